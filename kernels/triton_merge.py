"""The merge and the anchor's correction of :mod:`.merge`, each fused into one Triton kernel.

Same functions, same arguments, same mathematics; :mod:`.merge` calls them for fp32 accumulators on
CUDA devices and is their oracle. A merge in torch reads and writes the (N, Hq, D) output several
times; here every element is read once and written once. As in torch, an empty block leaves a row's
state as it was, bit for bit. The sums for dk0 and dv0 have a fixed order: chunk by chunk in a
program, then over the chunks.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl

from . import triton_config
from .interface import SoftmaxState
from .triton_config import CHUNK_ROWS, Config, block_columns
from .triton_ops import VARYING, load_tile


def merge_(
    state: SoftmaxState, start: int, stop: int, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """As :func:`.merge.merge_`."""
    _merge(state, start, stop - start, None, out, lse)


def merge_rows_(
    state: SoftmaxState, rows: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """As :func:`.merge.merge_rows_`."""
    _merge(state, 0, len(rows), rows, out, lse)


def anchor_forward_(
    state: SoftmaxState,
    q: torch.Tensor,
    k0: torch.Tensor,
    v0: torch.Tensor,
    scale: float,
    start: int,
    stop: int,
) -> None:
    """As :func:`.merge.anchor_forward_`."""
    config = _config(q)
    _launch(
        anchor_forward_kernel, triton.cdiv(stop - start, config.block_m) * q.shape[1], config,
        state.out[start:stop], state.lse[start:stop], q[start:stop],
        k0.contiguous(), v0.contiguous(), stop - start, q.shape[1], scale,
        *state.out.stride()[:2], *state.lse.stride(), *q.stride()[:2],
        **_shape(q, k0), BLOCK_R=config.block_m,
    )  # fmt: skip


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
    """As :func:`.merge.anchor_backward_`."""
    config, num_heads = _config(q, triton_config.ANCHOR_BACKWARD), q.shape[1]
    chunks = triton.cdiv(stop - start, CHUNK_ROWS)
    partial = torch.empty((chunks, num_heads, 2, q.shape[2]), dtype=torch.float32, device=q.device)
    _launch(
        anchor_backward_kernel, chunks * num_heads, config,
        dout[start:stop], q[start:stop], k0.contiguous(), v0.contiguous(),
        out[start:stop], lse[start:stop], dq[start:stop], partial,
        stop - start, num_heads, scale,
        *dout.stride()[:2], *q.stride()[:2], *out.stride()[:2], *lse.stride(), *dq.stride()[:2],
        **_shape(q, k0), BLOCK_R=config.block_m, CHUNK_R=CHUNK_ROWS,
    )  # fmt: skip
    sums = partial.sum(0).unflatten(0, (k0.shape[0], -1)).sum(1)
    dk0 += sums[:, 0]
    dv0 += sums[:, 1]


@triton.jit(do_not_specialize=VARYING)
def merge_kernel(
    out_ptr, lse_ptr, block_out_ptr, block_lse_ptr, rows_ptr,
    num_rows, num_heads, start,
    out_row, out_head, lse_row, lse_head,
    block_out_row, block_out_head, block_lse_row, block_lse_head,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    SCATTERED: tl.constexpr,
):  # fmt: skip
    """Merge BLOCK_R rows of one head; row r of the block is row ``rows[r]`` or ``start + r``."""
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    first = (tl.program_id(0) // num_heads) * BLOCK_R
    source = (first + tl.arange(0, BLOCK_R)).to(tl.int64)
    valid = source < num_rows
    if SCATTERED:
        target = tl.load(rows_ptr + source, mask=valid, other=0)
    else:
        target = source + start
    out_ptr += head * out_head
    lse_ptrs = lse_ptr + target * lse_row + head * lse_head
    lse_a = tl.load(lse_ptrs, mask=valid, other=float("-inf"))
    lse_b = tl.load(
        block_lse_ptr + source * block_lse_row + head * block_lse_head,
        mask=valid, other=float("-inf"),
    ).to(tl.float32)  # fmt: skip
    lse_b = tl.where(lse_b == float("inf"), float("-inf"), lse_b)
    seen = valid & (lse_b != float("-inf"))  # an empty block's output may hold anything
    block_out = load_tile(
        block_out_ptr + head * block_out_head, block_out_row, source, seen, HEAD_DIM, BLOCK_D, True
    ).to(tl.float32)
    out = load_tile(out_ptr, out_row, target, valid, HEAD_DIM, BLOCK_D, True)
    share_a, share_b, lse = _shares(lse_a, lse_b)
    _store_rows(
        out_ptr, out_row, target, valid, out * share_a[:, None] + block_out * share_b[:, None],
        HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    tl.store(lse_ptrs, lse, mask=valid)


@triton.jit(do_not_specialize=VARYING)
def anchor_forward_kernel(
    out_ptr, lse_ptr, q_ptr, k0_ptr, v0_ptr, num_rows, num_heads, scale,
    out_row, out_head, lse_row, lse_head, q_row, q_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Merge the anchor into BLOCK_R rows of one head."""
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    rows = ((tl.program_id(0) // num_heads) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    valid = rows < num_rows
    k0 = _load_anchor(k0_ptr, head // GROUP, HEAD_DIM, BLOCK_D)
    v0 = _load_anchor(v0_ptr, head // GROUP, HEAD_DIM, BLOCK_D)
    out_ptr += head * out_head
    lse_ptrs = lse_ptr + rows * lse_row + head * lse_head
    q = load_tile(q_ptr + head * q_head, q_row, rows, valid, HEAD_DIM, BLOCK_D, True)
    score = tl.sum(q.to(tl.float32) * k0[None, :], 1) * scale
    share, share0, lse = _shares(tl.load(lse_ptrs, mask=valid, other=0.0), score)
    out = load_tile(out_ptr, out_row, rows, valid, HEAD_DIM, BLOCK_D, True)
    _store_rows(
        out_ptr, out_row, rows, valid, out * share[:, None] + v0[None, :] * share0[:, None],
        HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    tl.store(lse_ptrs, lse, mask=valid)


@triton.jit(do_not_specialize=VARYING)
def anchor_backward_kernel(
    dout_ptr, q_ptr, k0_ptr, v0_ptr, out_ptr, lse_ptr, dq_ptr, partial_ptr,
    num_rows, num_heads, scale,
    dout_row, dout_head, q_row, q_head, out_row, out_head, lse_row, lse_head, dq_row, dq_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    CHUNK_R: tl.constexpr,
):  # fmt: skip
    """Add to dq in CHUNK_R rows of one head; their share of dk0 and dv0 to ``partial``
    (C, Hq, 2, D)."""
    chunk = tl.program_id(0) // num_heads
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    k0 = _load_anchor(k0_ptr, head // GROUP, HEAD_DIM, BLOCK_D)
    v0 = _load_anchor(v0_ptr, head // GROUP, HEAD_DIM, BLOCK_D)
    dk0 = tl.zeros([BLOCK_D], tl.float32)
    dv0 = tl.zeros([BLOCK_D], tl.float32)
    dout_ptr += head * dout_head
    q_ptr += head * q_head
    out_ptr += head * out_head
    dq_ptr += head * dq_head
    for first in range(chunk * CHUNK_R, min(num_rows, (chunk + 1) * CHUNK_R), BLOCK_R):
        rows = (first + tl.arange(0, BLOCK_R)).to(tl.int64)
        valid = rows < num_rows
        dout = load_tile(dout_ptr, dout_row, rows, valid, HEAD_DIM, BLOCK_D, True).to(tl.float32)
        q = load_tile(q_ptr, q_row, rows, valid, HEAD_DIM, BLOCK_D, True).to(tl.float32)
        out = load_tile(out_ptr, out_row, rows, valid, HEAD_DIM, BLOCK_D, True).to(tl.float32)
        dq = load_tile(dq_ptr, dq_row, rows, valid, HEAD_DIM, BLOCK_D, True)
        lse = tl.load(lse_ptr + rows * lse_row + head * lse_head, mask=valid, other=float("inf"))
        lse = tl.where(lse == float("-inf"), float("inf"), lse)
        prob = tl.exp(tl.sum(q * k0[None, :], 1) * scale - lse)
        dscore = prob * tl.sum(dout * (v0[None, :] - out), 1) * scale
        _store_rows(
            dq_ptr, dq_row, rows, valid, dq + dscore[:, None] * k0[None, :], HEAD_DIM, BLOCK_D
        )
        dk0 += tl.sum(dscore[:, None] * q, 0)
        dv0 += tl.sum(prob[:, None] * dout, 0)
    columns = tl.arange(0, BLOCK_D)
    partial_ptr += tl.program_id(0).to(tl.int64) * 2 * HEAD_DIM
    tl.store(partial_ptr + columns, dk0, mask=columns < HEAD_DIM)
    tl.store(partial_ptr + HEAD_DIM + columns, dv0, mask=columns < HEAD_DIM)


@triton.jit
def _shares(lse_a, lse_b):
    """Shares of two blocks in their union, and its lse; (0, 0, -inf) for two empty ones."""
    top = tl.maximum(lse_a, lse_b)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weight_a, weight_b = tl.exp(lse_a - shift), tl.exp(lse_b - shift)
    total = weight_a + weight_b
    total = tl.where(total == 0.0, 1.0, total)
    return weight_a / total, weight_b / total, top + tl.log(total)


@triton.jit
def _load_anchor(ptr, kv_head, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    columns = tl.arange(0, BLOCK_D)
    row = tl.load(ptr + kv_head * HEAD_DIM + columns, mask=columns < HEAD_DIM, other=0.0)
    return row.to(tl.float32)


@triton.jit
def _store_rows(ptr, row_stride, rows, valid, tile, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    columns = tl.arange(0, BLOCK_D)
    inside = valid[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(ptr + rows[:, None] * row_stride + columns[None, :], tile, mask=inside)


def _merge(
    state: SoftmaxState,
    start: int,
    num_rows: int,
    rows: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    config, (_, num_heads, head_dim) = _config(state.out), state.out.shape
    _launch(
        merge_kernel, triton.cdiv(num_rows, config.block_m) * num_heads, config,
        state.out, state.lse, out, lse, state.lse if rows is None else rows,
        num_rows, num_heads, start,
        *state.out.stride()[:2], *state.lse.stride(), *out.stride()[:2], *lse.stride(),
        HEAD_DIM=head_dim, BLOCK_D=block_columns(head_dim), BLOCK_R=config.block_m,
        SCATTERED=rows is not None,
    )  # fmt: skip


def _config(like: torch.Tensor, config: Config = triton_config.PREPARE) -> Config:
    return triton_config.INTERPRETER if like.device.type == "cpu" else config


def _shape(q: torch.Tensor, k0: torch.Tensor) -> dict[str, int]:
    num_heads, head_dim = q.shape[1:]
    return {
        "GROUP": num_heads // k0.shape[0],
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_columns(head_dim),
    }


def _launch(kernel: Any, programs: int, config: Config, *args: Any, **constants: Any) -> None:
    if programs == 0:
        return
    device = args[0].device
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[(programs,)](
            *args, **constants, num_warps=config.num_warps, num_stages=1, enable_fp_fusion=True
        )
