"""Attention over a plan: one autograd function that every exchange shares.

Shape suffixes: B windows, S local tokens of each, N local rows (B * S; with
ulysses those of the whole team), M rows of a key buffer,
A anchors, H heads (Hq query, Hkv key/value), D head dimension. Keys and values travel together as
rows of shape (2, Hkv, D).

Forward, on every rank: while the tiles of step s are computed, the rows of step s+1 travel; results
are merged in fp32 by log-sum-exp. The anchor, seen by every query outside its own document, is one
more key merged last: with ``s = scale * q . k0`` it is the exact rank-1 correction
derived in :mod:`anchorcontext.kernels.merge` (AnchorAttention: arXiv 2411.13476).

Backward needs only the merged (out, LSE): each step's tile gradients are then independent. Keys
travel again instead of being stored, so memory stays O(L / P); gradients of foreign rows go
straight back to their owners in fp32 and are added there in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from anchorcontext.kernels import (
    AnchorKeys,
    Rotation,
    SoftmaxState,
    accumulator_dtype,
    backward_with_anchors_,
    forward_with_anchors_,
)

from ..errors import UserError
from ..plan import RingFlashAttnPlan, Step, Transfer, check_heads
from ..words import counted
from .keep import keep_result, recomputed_result
from .plan import Plan
from .ring_flash_attn import ring_flash_attention
from .transfer import Exchange, add_, put_, take
from .ulysses import heads_to_tokens, tokens_to_heads


def distributed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    scale: float | None = None,
    rotations: Sequence[Rotation] | None = None,
) -> torch.Tensor:
    """Attention of this rank's queries over the plan's windows; differentiable.

    Args:
        q: (B, Hq, S, D) this rank's queries.
        k, v: (B, Hkv, S, D) this rank's keys and values, same dtype and device; Hkv divides Hq.
        plan: of this micro-batch, on every rank of its SP group.
        scale: multiplies the dot products; default ``D ** -0.5``.
        rotations: of the plan's steps (:func:`~.rotation.plan_rotations`): q and k come unrotated,
            travel so, and the engine rotates them. Default: they come rotated.

    Returns:
        (B, Hq, S, D) in q's dtype; zero on padding. Accumulated in fp32 (fp64 for fp64).

    Raises:
        UserError: shapes, dtypes or devices that do not fit the plan or each other.
    """
    _check(q, k, v, plan)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    if isinstance(plan.data, RingFlashAttnPlan):
        assert rotations is None, "plan_rotations refuses this backend"
        return ring_flash_attention(q, k, v, plan, float(scale))
    batch, heads, length, head_dim = q.shape
    q_rows, k_rows, v_rows = _rows(q), _rows(k), _rows(v)
    if plan.data.ulysses > 1:
        q_rows, k_rows, v_rows = tokens_to_heads(q_rows, k_rows, v_rows, plan)
    out = _DistributedAttention.apply(q_rows, k_rows, v_rows, plan, float(scale), rotations)
    if plan.data.ulysses > 1:
        out = heads_to_tokens(out, plan)
    return out.view(batch, length, heads, head_dim).transpose(1, 2)


class _DistributedAttention(torch.autograd.Function):
    """q (N, Hq, D), k and v (N, Hkv, D) -> out (N, Hq, D)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: Plan,
        scale: float,
        rotations: Sequence[Rotation] | None,
    ) -> torch.Tensor:
        kept = recomputed_result(q)
        if kept is None:
            with torch.autocast(q.device.type, enabled=False):
                state = _forward(q, k, v, plan, scale, rotations)
                kept = state.out.to(q.dtype), state.lse
            keep_result(*kept)
        out, lse = kept
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.arguments = plan, scale, rotations
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            dq, dk, dv = _backward(dout.contiguous(), q, k, v, out, lse, *ctx.arguments)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    scale: float,
    rotations: Sequence[Rotation] | None,
) -> SoftmaxState:
    engine, meter = plan.engine(q.device, q.dtype, rotations is not None), plan.meter
    state = SoftmaxState.empty(q)
    keys = _KeyTravel(k, v, plan)
    for number, (step, k_step, v_step) in enumerate(keys):
        anchors = keys.anchors() if step is plan.mine.steps[-1] else None
        rotation = None if rotations is None else rotations[number]
        with meter.computing():
            forward_with_anchors_(
                engine, q, k_step, v_step, step.tiles, scale, state, anchors, rotation
            )
    return state


def _backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    plan: Plan,
    scale: float,
    rotations: Sequence[Rotation] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    engine, meter = plan.engine(q.device, q.dtype, rotations is not None), plan.meter
    dtype = accumulator_dtype(q.dtype)
    dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
    dkv = torch.zeros((len(k), 2, *k.shape[1:]), dtype=dtype, device=k.device)
    keys = _KeyTravel(k, v, plan)
    anchors: AnchorKeys | None = None
    d_anchors: torch.Tensor | None = None
    returning: Exchange | None = None
    for number, (step, k_step, v_step) in enumerate(keys):
        own = step is plan.mine.steps[0]
        d_step = dkv if own else dkv.new_zeros((step.num_rows, *dkv.shape[1:]))
        if step is plan.mine.steps[-1]:
            anchors = keys.anchors()
            d_anchors = torch.zeros(anchors.rows.shape, dtype=dtype, device=q.device)
        rotation = None if rotations is None else rotations[number]
        with meter.computing():
            backward_with_anchors_(
                engine, dout, q, k_step, v_step, out, lse, step.tiles, scale,
                dq, d_step[:, 0], d_step[:, 1], anchors, d_anchors, rotation,
            )  # fmt: skip
        if not own:
            # Added one step late, so that a return travels while the next step computes.
            _add_returns_(dkv, returning)
            returning = Exchange(step.returns, d_step, plan.peers, meter)
            if not plan.overlap:
                returning.wait()
            if step.kept is not None:
                add_(dkv, step.kept[0], take(d_step, step.kept[1]))
    _add_returns_(dkv, returning)
    assert d_anchors is not None, "a plan has a last step"
    _return_anchors_(dkv, d_anchors, plan)
    return dq, dkv[:, 0], dkv[:, 1]


class _KeyTravel:
    """The keys of a plan's steps, in order: yields (step, k (M, Hkv, D), v (M, Hkv, D)).

    While the caller computes on one step's rows, the next step's travel (unless the plan says not
    to overlap). Anchors travel from the first step on and are asked for with the last step's rows.
    """

    def __init__(self, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> None:
        self._k, self._v, self._plan = k, v, plan
        sent = plan.peers is not None and plan.mine.anchors.num_anchors > 0
        needed = sent or len(plan.mine.steps) > 1
        self._own = torch.stack([k, v], dim=1) if needed else None
        self._anchor_exchange = self._post(plan.mine.anchors.broadcast, self._own)

    def __iter__(self) -> Iterator[tuple[Step, torch.Tensor, torch.Tensor]]:
        steps = self._plan.mine.steps
        held = self._own
        k, v = self._k, self._v
        for index, step in enumerate(steps):
            following: Step | None = steps[index + 1] if index + 1 < len(steps) else None
            if following is None:
                yield step, k, v
                return
            assert held is not None, "a plan of several steps has peers"
            incoming = self._post(following.incoming, held)
            if incoming is not None and not self._plan.overlap:
                incoming.wait()
            yield step, k, v
            held = self._assemble(following, incoming, held)
            k, v = held[:, 0], held[:, 1]

    def anchors(self) -> AnchorKeys:
        """The anchors' rows (A, 2, Hkv, D), zero where no query here sees them, and who does."""
        plan = self._plan.mine.anchors
        anchors = self._k.new_zeros((plan.num_anchors, 2, *self._k.shape[1:]))
        for number, row in plan.own.tolist():
            anchors[number, 0] = self._k[row]
            anchors[number, 1] = self._v[row]
        if self._anchor_exchange is not None:
            arrived = self._anchor_exchange.wait()
            for message, rows in zip(plan.broadcast.receives, arrived, strict=True):
                put_(anchors, message.rows, rows)
        return AnchorKeys(anchors, plan.queries)

    def _post(self, transfer: Transfer, source: torch.Tensor | None) -> Exchange | None:
        if source is None:
            return None
        return Exchange(transfer, source, self._plan.peers, self._plan.meter)

    def _assemble(self, step: Step, incoming: Exchange | None, held: torch.Tensor) -> torch.Tensor:
        assert incoming is not None
        arrived, receives = incoming.wait(), step.incoming.receives
        if len(receives) == 1 and receives[0].rows.covers(step.num_rows):
            return arrived[0]
        buffer = held.new_empty((step.num_rows, *held.shape[1:]))
        if step.kept is not None:
            put_(buffer, step.kept[1], take(held, step.kept[0]))
        for message, rows in zip(receives, arrived, strict=True):
            put_(buffer, message.rows, rows)
        return buffer


def _add_returns_(dkv: torch.Tensor, returning: Exchange | None) -> None:
    """Add the gradients of own rows that other ranks computed."""
    if returning is not None:
        arrived = returning.wait()
        for message, rows in zip(returning.transfer.receives, arrived, strict=True):
            add_(dkv, message.rows, rows)


def _return_anchors_(dkv: torch.Tensor, d_anchors: torch.Tensor, plan: Plan) -> None:
    """Sum the anchors' gradients into their owner's rows: the broadcast run backwards."""
    anchors = plan.mine.anchors
    for number, row in anchors.own.tolist():
        dkv[row] += d_anchors[number]
    if plan.peers is None:
        return
    back = Transfer(sends=anchors.broadcast.receives, receives=anchors.broadcast.sends)
    exchange = Exchange(back, d_anchors, plan.peers, plan.meter)
    _add_returns_(dkv, exchange)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """(B, H, S, D) -> (B * S, H, D), token-major."""
    batch, heads, length, head_dim = x.shape
    return x.transpose(1, 2).reshape(batch * length, heads, head_dim)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        raise UserError(f"{shapes}: give q (B, Hq, S, D) and k, v (B, Hkv, S, D) of one shape")
    if q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:] or q.shape[1] % k.shape[1]:
        raise UserError(
            f"{shapes}: windows, tokens and head dimension must agree, and key/value heads must "
            "divide query heads"
        )
    if (q.shape[0], q.shape[2]) != (plan.batch_size, plan.local_length):
        raise UserError(
            f"{shapes}: the plan has {counted(plan.batch_size, 'window')} and "
            f"{counted(plan.local_length, 'token')} a rank; call the model with the shard made "
            "from this plan"
        )
    if len({x.dtype for x in (q, k, v)}) > 1 or len({x.device for x in (q, k, v)}) > 1:
        raise UserError(
            f"q is {q.dtype} on {q.device}, k {k.dtype} on {k.device}, v {v.dtype} on {v.device}: "
            "all three must share dtype and device"
        )
    check_heads(q.shape[1], k.shape[1], plan.data.ulysses)
