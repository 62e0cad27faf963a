"""What the Triton kernels share: loads of row tiles, RoPE on the fly, the pieces of a softmax.

Only the engine imports this module and its neighbours ``triton_forward`` and ``triton_backward``,
once it knows that Triton is there. Features of Triton 3.6 and later only.

Legend: a tile has BLOCK rows (BLOCK_M queries or BLOCK_N keys) and HEAD_DIM columns, padded to
BLOCK_D, the next power of two. With ROPE a query or key tile is held as its two halves of HALF_D
columns (padded to BLOCK_HALF), because the rotation mixes column d with column d + HEAD_DIM / 2:
``x1 cos - x2 sin`` and ``x2 cos + x1 sin``; the product of two such tiles is the sum of the
products of their halves. Without ROPE the second "half" is the tile itself and is never used.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

# Arguments that change from call to call: a kernel compiled for one value or its divisibility by 16
# would be compiled again, for seconds, in the middle of training.
VARYING = ("num_rows", "num_queries", "num_keys", "num_blocks", "num_heads", "start")
INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_tile(
    ptr, row_stride, rows, valid, DIM: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    """Rows ``rows`` (offsets from ``ptr``) and DIM columns; 0 where ``valid`` is false."""
    columns = tl.arange(0, BLOCK)
    ptrs = ptr + rows[:, None] * row_stride + columns[None, :]
    if MASKED:
        if DIM == BLOCK:
            tile = tl.load(ptrs, mask=valid[:, None], other=0.0)
        else:
            tile = tl.load(ptrs, mask=valid[:, None] & (columns < DIM)[None, :], other=0.0)
    else:
        if DIM == BLOCK:
            tile = tl.load(ptrs)
        else:
            tile = tl.load(ptrs, mask=(columns < DIM)[None, :], other=0.0)
    return tile


@triton.jit
def add_tile(ptr, row_stride, rows, valid, tile, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Add ``tile`` to memory; this program alone owns the rows."""
    columns = tl.arange(0, BLOCK)
    ptrs = ptr + rows[:, None] * row_stride + columns[None, :]
    inside = valid[:, None] & (columns < DIM)[None, :]
    tl.store(ptrs, tl.load(ptrs, mask=inside, other=0.0) + tile, mask=inside)


@triton.jit
def load_operand(
    ptr, row_stride, cos_ptr, sin_ptr, rows, valid,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HALF_D: tl.constexpr,
    BLOCK_HALF: tl.constexpr, ROPE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A query or key tile for a dot product; with ROPE rotated in fp32, as two halves."""
    if ROPE:
        first = load_tile(ptr, row_stride, rows, valid, HALF_D, BLOCK_HALF, MASKED)
        second = load_tile(ptr + HALF_D, row_stride, rows, valid, HALF_D, BLOCK_HALF, MASKED)
        cos = load_tile(cos_ptr, HALF_D, rows, valid, HALF_D, BLOCK_HALF, MASKED)
        sin = load_tile(sin_ptr, HALF_D, rows, valid, HALF_D, BLOCK_HALF, MASKED)
        first, second = first.to(tl.float32), second.to(tl.float32)
        return first * cos - second * sin, second * cos + first * sin
    else:
        tile = load_tile(ptr, row_stride, rows, valid, HEAD_DIM, BLOCK_D, MASKED)
        return tile, tile


@triton.jit
def load_rotated(
    ptr, row_stride, rows, valid,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HALF_D: tl.constexpr,
    BLOCK_HALF: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """As `load_operand`, in fp32, from rows that need no rotation: the anchors' keys."""
    if ROPE:
        first = load_tile(ptr, row_stride, rows, valid, HALF_D, BLOCK_HALF, True)
        second = load_tile(ptr + HALF_D, row_stride, rows, valid, HALF_D, BLOCK_HALF, True)
        return first.to(tl.float32), second.to(tl.float32)
    else:
        tile = load_tile(ptr, row_stride, rows, valid, HEAD_DIM, BLOCK_D, True).to(tl.float32)
        return tile, tile


@triton.jit
def add_unrotated(
    ptr, row_stride, cos_ptr, sin_ptr, rows, valid, first, second,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HALF_D: tl.constexpr,
    BLOCK_HALF: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Add the gradient of a `load_operand` tile: with ROPE turned back by the same angle."""
    if ROPE:
        cos = load_tile(cos_ptr, HALF_D, rows, valid, HALF_D, BLOCK_HALF, True)
        sin = load_tile(sin_ptr, HALF_D, rows, valid, HALF_D, BLOCK_HALF, True)
        back_first, back_second = first * cos + second * sin, second * cos - first * sin
        add_tile(ptr, row_stride, rows, valid, back_first, HALF_D, BLOCK_HALF)
        add_tile(ptr + HALF_D, row_stride, rows, valid, back_second, HALF_D, BLOCK_HALF)
    else:
        add_tile(ptr, row_stride, rows, valid, first, HEAD_DIM, BLOCK_D)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """``acc + a @ b`` in fp32; PRECISION is how fp32 operands are multiplied."""
    if INTERPRETED:  # Triton 3.9's interpreter multiplies the bit patterns of bf16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def dot_transposed(
    a_first, a_second, b_first, b_second, ROPE: tl.constexpr, PRECISION: tl.constexpr
):
    """``a @ b.T`` in fp32."""
    product = dot(a_first, tl.trans(b_first), None, PRECISION)
    if ROPE:
        product = dot(a_second, tl.trans(b_second), product, PRECISION)
    return product


@triton.jit
def row_dot(a_first, a_second, b_first, b_second, ROPE: tl.constexpr):
    """Dot product of each row of ``a`` with the row of ``b``, a product and a sum in fp32."""
    total = tl.sum(a_first.to(tl.float32) * b_first, 1)
    if ROPE:
        total += tl.sum(a_second.to(tl.float32) * b_second, 1)
    return total
