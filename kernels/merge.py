"""Combining partial softmax results: the log-sum-exp merge, and the anchor as a one-key block.

**Merge.** Let A and B be two disjoint sets of keys of one query, each with its normalised output
``o`` and log-sum-exp ``l``::

    l_A = log sum_A exp(s_j)          o_A = sum_A exp(s_j - l_A) v_j

Softmax over both sets weighs each partial output with its share of the total mass::

    l = log(exp l_A + exp l_B)        o = exp(l_A - l) o_A + exp(l_B - l) o_B

With ``m = max(l_A, l_B)``, ``a = exp(l_A - m)`` and ``b = exp(l_B - m)`` one of a, b is exactly 1,
so nothing overflows, ``l = m + log1p(a b)`` and the shares are ``a / (a + b)`` and ``b / (a + b)``.
An empty side has ``l = -inf``: its share is exactly 0 and the other side's exactly 1, so the other
side passes through bit for bit; two empty sides stay ``o = 0, l = -inf``.

**Anchor.** The anchor is a block of one key: ``o_B = v0`` and ``l_B = s0 = scale q.k0``. With the
final, merged ``out`` and ``lse`` its probability is ``p0 = exp(s0 - lse)`` and the softmax backward
of this one column is::

    ds  = p0 (dO.v0 - rowsum(dO * out)) = p0 dO.(v0 - out)
    dq += scale ds k0      dk0 += scale sum ds q      dv0 += sum p0 dO

The right-hand form of ``ds`` needs one pass and is exactly 0 for a query that sees only the anchor.

Legend: N query rows, Hq query heads, Hkv key/value heads, G = Hq / Hkv, D head dimension. All
arithmetic is in the accumulator dtype (fp32, fp64 for fp64 inputs), row block by row block, so
that no second (N, Hq, D) tensor is made. fp32 accumulators go through fused kernels where there
are some: on a CUDA device with Triton through :mod:`.triton_merge`, the anchor's on a CPU with a C
compiler through :mod:`.cpu_anchor`. This file is the oracle of both.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import math
from collections.abc import Iterator
from types import ModuleType

import torch

from . import cpu_anchor, cpu_library
from .interface import SoftmaxState

logger = logging.getLogger("anchorcontext")

# A block of 2^18 fp32 elements is 1 MiB and stays in a core's L2 cache; other devices want few
# launches instead.
CPU_BLOCK_ELEMENTS = 1 << 18
DEVICE_BLOCK_ELEMENTS = 1 << 25


def merge_(
    state: SoftmaxState, start: int, stop: int, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Merge a block's result into rows ``start:stop`` of ``state``, in place.

    Args:
        state: running result, ``out`` (N, Hq, D) and ``lse`` (N, Hq), accumulator dtype.
        start: first row.
        stop: row after the last.
        out: (stop - start, Hq, D), any float dtype; ignored where the block is empty.
        lse: (stop - start, Hq); ``-inf``, or ``+inf`` as FlashAttention-2 reports it, means that
            the row saw no key in this block.
    """
    if (fused := _fused(state.out)) is not None:
        fused.merge_(state, start, stop, out, lse)
        return
    for a, b in _row_blocks(start, stop, state.out):
        block = slice(a - start, b - start)
        _merge_block_(state.out[a:b], state.lse[a:b], out[block], lse[block])


def merge_rows_(
    state: SoftmaxState, rows: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Merge a block's result into the scattered rows ``rows`` of ``state``, in place.

    Args:
        state: running result, as for `merge_`.
        rows: int64 (R,), distinct row numbers.
        out: (R, Hq, D) and ``lse`` (R, Hq), as for `merge_`.
        lse: see ``out``.
    """
    if (fused := _fused(state.out)) is not None:
        fused.merge_rows_(state, rows, out, lse)
        return
    lse_before = state.lse.index_select(0, rows)
    if _all_empty(lse_before):
        out_before = torch.empty_like(out, dtype=state.out.dtype)
    else:
        out_before = state.out.index_select(0, rows)
    merged = SoftmaxState(out=out_before, lse=lse_before)
    merge_(merged, 0, len(rows), out, lse)
    state.out.index_copy_(0, rows, merged.out)
    state.lse.index_copy_(0, rows, merged.lse)


def lse_for_backward(lse: torch.Tensor) -> torch.Tensor:
    """``lse`` with the rows that saw no key set to +inf, so that ``exp(s - lse)`` is 0 there."""
    return lse.masked_fill(lse == -math.inf, math.inf)


def anchor_forward_(
    state: SoftmaxState,
    q: torch.Tensor,
    k0: torch.Tensor,
    v0: torch.Tensor,
    scale: float,
    start: int,
    stop: int,
) -> None:
    """Let query rows ``start:stop`` see the anchor: merge its key and value into ``state``.

    The caller leaves out the anchor's own document, whose tiles already hold the anchor.

    Args:
        state: running result, ``out`` (N, Hq, D) and ``lse`` (N, Hq).
        q: queries (N, Hq, D).
        k0: the anchor's key (Hkv, D).
        v0: the anchor's value (Hkv, D).
        scale: factor of the dot products.
        start: first query row.
        stop: row after the last.
    """
    if (fused := _fused_anchor(state.out, q)) is not None:
        fused.anchor_forward_(state, q, k0, v0, scale, start, stop)
        return
    group = q.shape[1] // k0.shape[0]
    k0 = k0.to(state.out.dtype)
    v0_per_query_head = v0.to(state.out.dtype).repeat_interleave(group, dim=0)
    for a, b in _row_blocks(start, stop, state.out):
        scores = _anchor_scores(_grouped(q[a:b], k0), k0, scale).flatten(1)
        block_out = v0_per_query_head.expand_as(state.out[a:b])
        _merge_block_(state.out[a:b], state.lse[a:b], block_out, scores)


def anchor_backward_(
    dout: torch.Tensor,
    q: torch.Tensor,
    k0: torch.Tensor,
    v0: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    start: int,
    stop: int,
    dq: torch.Tensor,
    dk0: torch.Tensor,
    dv0: torch.Tensor,
) -> None:
    """Add the gradients of `anchor_forward_` for rows ``start:stop``, in place.

    Args:
        dout: gradient of the merged output (N, Hq, D).
        q: queries (N, Hq, D).
        k0: the anchor's key (Hkv, D).
        v0: the anchor's value (Hkv, D).
        out: the final, merged output (N, Hq, D), any float dtype.
        lse: the final, merged log-sum-exp (N, Hq).
        scale: factor of the dot products.
        start: first query row.
        stop: row after the last.
        dq: accumulator (N, Hq, D), fp32 (fp64 for fp64 inputs).
        dk0: accumulator (Hkv, D), same dtype.
        dv0: accumulator (Hkv, D), same dtype.
    """
    if (fused := _fused_anchor(dq, q, dout, out)) is not None:
        fused.anchor_backward_(dout, q, k0, v0, out, lse, scale, start, stop, dq, dk0, dv0)
        return
    k0, v0 = k0.to(dq.dtype), v0.to(dq.dtype)
    for a, b in _row_blocks(start, stop, dq):
        q_block, dout_block, out_block = (_grouped(x[a:b], k0) for x in (q, dout, out))
        scores = _anchor_scores(q_block, k0, scale)
        lse_block = lse_for_backward(lse[a:b]).unflatten(1, scores.shape[1:])
        probs = torch.exp(scores - lse_block).unsqueeze(-1)
        dscores = probs * (dout_block * (v0[:, None] - out_block)).sum(-1, keepdim=True)
        dscores *= scale
        _grouped(dq[a:b], k0).addcmul_(dscores, k0[:, None])
        dk0 += (dscores * q_block).sum((0, 2))
        dv0 += (probs * dout_block).sum((0, 2))


def _fused(accumulator: torch.Tensor) -> ModuleType | None:
    """The fused kernels, where they serve ``accumulator`` (N, Hq, D)."""
    serves = accumulator.device.type == "cuda" and accumulator.dtype == torch.float32
    return _fused_kernels(accumulator.device) if serves else None


def _fused_anchor(accumulator: torch.Tensor, *inputs: torch.Tensor) -> ModuleType | None:
    """The kernels of the anchor's correction, where they serve fp32 accumulators and ``inputs``."""
    if accumulator.device.type != "cpu":
        return _fused(accumulator)
    serves = accumulator.dtype == torch.float32 and cpu_library.why_not(*inputs) is None
    return cpu_anchor if serves else None


@functools.cache
def _fused_kernels(device: torch.device) -> ModuleType | None:
    """The module, tried once: Triton needs a C compiler, which images for GPUs often lack."""
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        module = importlib.import_module(".triton_merge", __package__)
        state = SoftmaxState.empty(torch.zeros(1, 1, 16, device=device))
        module.merge_(state, 0, 1, state.out, state.lse)
    except Exception as error:  # whatever stands between Triton and the device
        logger.warning("merges on %s run in torch, Triton's kernels do not: %s", device, error)
        return None
    return module


def _merge_block_(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> None:
    """The merge of the module docstring, A in place. The two shortcuts change no bit of it."""
    lse_b = lse_b.to(lse_a.dtype)
    lse_b = lse_b.masked_fill(lse_b == math.inf, -math.inf)
    empty_b = lse_b == -math.inf
    if lse_a.device.type != "cpu" or bool(empty_b.any()):
        out_b = out_b.masked_fill(empty_b.unsqueeze(-1), 0)  # 0 * nan would reach A
    if _all_empty(lse_a):
        out_a.copy_(out_b)
        lse_a.copy_(lse_b)
        return
    top = torch.maximum(lse_a, lse_b)
    shift = top.masked_fill(top == -math.inf, 0)  # -inf - -inf is nan
    weight_a, weight_b = torch.exp(lse_a - shift), torch.exp(lse_b - shift)
    total = weight_a + weight_b
    total.masked_fill_(total == 0, 1)
    lse_a.copy_(top + torch.log1p(weight_a * weight_b))
    out_a.mul_((weight_a / total).unsqueeze(-1))
    out_a.addcmul_(out_b.to(out_a.dtype), (weight_b / total).unsqueeze(-1))


def _all_empty(lse: torch.Tensor) -> bool:
    """Whether no row has seen a key yet. Only asked of CPU tensors: elsewhere the answer would
    wait for the device, and the merge gives the same bits without it."""
    return lse.device.type == "cpu" and bool((lse == -math.inf).all())


def _anchor_scores(q_block: torch.Tensor, k0: torch.Tensor, scale: float) -> torch.Tensor:
    """``scale * q.k0`` (n, Hkv, G). A product and a sum, because a matmul may run in TF32 or bf16
    when the user allows that, and its rounding may depend on the number of rows."""
    return (q_block * k0[:, None]).sum(-1).mul_(scale)


def _grouped(x: torch.Tensor, k0: torch.Tensor) -> torch.Tensor:
    """(n, Hq, D) as (n, Hkv, G, D) in k0's dtype; a view when the dtype is k0's already."""
    return x.to(k0.dtype).unflatten(1, (k0.shape[0], -1))


def _row_blocks(start: int, stop: int, like: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Cut rows ``start:stop`` of ``like`` (N, Hq, D) into blocks of bounded size."""
    elements = CPU_BLOCK_ELEMENTS if like.device.type == "cpu" else DEVICE_BLOCK_ELEMENTS
    rows = max(1, elements // max(1, like[0].numel())) if len(like) else 1
    for a in range(start, stop, rows):
        yield a, min(a + rows, stop)
