"""Ulysses: the ranks of a team swap tokens for heads before attention, and back after it.

DeepSpeed-Ulysses (arXiv 2309.14509). Before: every rank holds its own tokens of all heads. After:
the tokens of all U ranks for Hq / U query heads and the key/value heads those
read. Queries, keys and values of one destination travel in one message.

With Hkv < U each key/value head goes to U / Hkv ranks; backward sums its gradients over them.

Shape suffixes: n local rows (B windows x S tokens), N = U * n rows of the team, D head dimension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from anchorcontext.kernels import accumulator_dtype

from ..plan.heads import heads_per_rank, kv_heads_of

if TYPE_CHECKING:
    from .plan import Plan


def tokens_to_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q (n, Hq, D), k and v (n, Hkv, D) -> (N, Hq / U, D), twice (N, max(1, Hkv / U), D)."""
    return _TokensToHeads.apply(q, k, v, plan)


def heads_to_tokens(out: torch.Tensor, plan: Plan) -> torch.Tensor:
    """out (N, Hq / U, D) -> (n, Hq, D)."""
    return _HeadsToTokens.apply(out, plan)


class _TokensToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan
    ) -> tuple[torch.Tensor, ...]:
        ctx.plan, ctx.num_kv_heads = plan, k.shape[1]
        size = plan.data.ulysses
        heads, kv_heads = heads_per_rank(q.shape[1], k.shape[1], size)
        parts = []
        for member in range(size):
            own = slice(member * heads, (member + 1) * heads)
            read = kv_heads_of(member, k.shape[1], size)
            parts.append(torch.cat([q[:, own], k[:, read], v[:, read]], dim=1))
        whole = _in_token_order(torch.cat(_swap(parts, plan)), plan)
        return whole.split([heads, kv_heads, kv_heads], dim=1)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        plan, num_kv_heads = ctx.plan, ctx.num_kv_heads
        size, heads = plan.data.ulysses, dq.shape[1]
        whole = _in_member_order(torch.cat([dq, dk, dv], dim=1), plan)
        parts = _swap([part.contiguous() for part in whole.chunk(size)], plan)
        dq = torch.cat([part[:, :heads] for part in parts], dim=1)
        shape = (len(dq), num_kv_heads, dq.shape[2])
        dkv = dq.new_zeros((2, *shape), dtype=accumulator_dtype(dq.dtype))
        for member, part in enumerate(parts):
            read = kv_heads_of(member, num_kv_heads, size)
            dkv[0, :, read] += part[:, heads : heads + dk.shape[1]]
            dkv[1, :, read] += part[:, heads + dk.shape[1] :]
        dk, dv = dkv.to(dq.dtype)
        return dq, dk, dv, None


class _HeadsToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, plan: Plan) -> torch.Tensor:
        ctx.plan = plan
        parts = _in_member_order(out, plan).chunk(plan.data.ulysses)
        return torch.cat(_swap([part.contiguous() for part in parts], plan), dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, None]:
        parts = dout.chunk(ctx.plan.data.ulysses, dim=1)
        whole = torch.cat(_swap([part.contiguous() for part in parts], ctx.plan))
        return _in_token_order(whole, ctx.plan), None


def _swap(parts: list[torch.Tensor], plan: Plan) -> list[torch.Tensor]:
    """Send ``parts[m]`` to member m of the team; returns what each member sent, in order."""
    team, meter = plan.team, plan.meter
    assert team is not None
    me = plan.sp_rank % plan.data.ulysses
    received = [part if m == me else torch.empty_like(part) for m, part in enumerate(parts)]
    operations = []
    for member, part in enumerate(parts):
        if member != me:
            operations.append(team.operation(dist.isend, part, member))
            operations.append(team.operation(dist.irecv, received[member], member))
            meter.bytes_sent += part.numel() * part.element_size()
            meter.messages_sent += 1
    with meter.waiting():
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    return received


def _in_token_order(rows: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Rows listed member by member -> window by window in the order of the team."""
    order = plan.team_order(rows.device)
    return rows if order is None else rows.index_select(0, order)


def _in_member_order(rows: torch.Tensor, plan: Plan) -> torch.Tensor:
    """The inverse of :func:`_in_token_order`."""
    order = plan.team_order(rows.device)
    if order is None:
        return rows
    return torch.empty_like(rows).index_copy_(0, order, rows)
