"""What the Triton kernels share: tiles of rows, RoPE on the fly, products over the head dimension.

Only the engine imports this module and its neighbours ``triton_forward`` and ``triton_backward``,
once it knows that Triton is there. Features of Triton 3.6 and later only.

Legend: BLOCK rows of a matrix (BLOCK_M queries or BLOCK_N keys) are described by a tuple
``(ptr, row_stride, rows, valid, cos_ptr, sin_ptr)``: where they are, which of them exist and, of
queries and keys, their angles. They have HEAD_DIM columns, and there are two ways to hold them:

* RESIDENT, for 16-bit operands: a tile of all columns (padded to PART = BLOCK_D, the next power of
  two) is loaded once and kept.
* In parts of PART columns, for fp32 operands: tf32x3 needs the high and the low half of both
  factors in registers, which at all columns are more than there are. A product over the head
  dimension reads both factors again, STEP columns at a time; an accumulator is a tuple of parts.

With ROPE a part is the same PART columns of each half of HALF_D columns, because the rotation mixes
column d with column d + HEAD_DIM / 2: ``x1 cos - x2 sin`` and ``x2 cos + x1 sin``; accumulators
alternate parts of the first and of the second half.
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
    return load_part((ptr, row_stride, rows, valid), 0, DIM, BLOCK, MASKED)


@triton.jit
def load_part(x, part, DIM: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """BLOCK columns from ``part * BLOCK`` on, of DIM; 0 beyond, and where a row is not valid."""
    columns = part * BLOCK + tl.arange(0, BLOCK)
    ptrs = x[0] + x[2][:, None] * x[1] + columns[None, :]
    if MASKED:
        if DIM % BLOCK == 0:
            tile = tl.load(ptrs, mask=x[3][:, None], other=0.0)
        else:
            tile = tl.load(ptrs, mask=x[3][:, None] & (columns < DIM)[None, :], other=0.0)
    else:
        if DIM % BLOCK == 0:
            tile = tl.load(ptrs)
        else:
            tile = tl.load(ptrs, mask=(columns < DIM)[None, :], other=0.0)
    return tile


@triton.jit
def load_halves(x, part, HALF_D: tl.constexpr, PART: tl.constexpr, MASKED: tl.constexpr):
    """A part of both halves in fp32, as they are: of the anchors' keys, which come rotated."""
    first = load_part(x, part, HALF_D, PART, MASKED)
    second = load_part((x[0] + HALF_D, x[1], x[2], x[3]), part, HALF_D, PART, MASKED)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def load_rotated(x, part, HALF_D: tl.constexpr, PART: tl.constexpr, MASKED: tl.constexpr):
    """A part of both halves, rotated in fp32."""
    first, second = load_halves(x, part, HALF_D, PART, MASKED)
    cos = load_part((x[4], HALF_D, x[2], x[3]), part, HALF_D, PART, MASKED)
    sin = load_part((x[5], HALF_D, x[2], x[3]), part, HALF_D, PART, MASKED)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """``acc + a @ b`` in fp32; PRECISION is how fp32 operands are multiplied."""
    if INTERPRETED:  # Triton 3.9's interpreter multiplies the bit patterns of bf16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def load_resident(
    x, HEAD_DIM: tl.constexpr, PART: tl.constexpr, RESIDENT: tl.constexpr, MASKED: tl.constexpr
):
    """The tile of all columns where it is RESIDENT; elsewhere something that nobody uses."""
    if RESIDENT:
        return load_part(x, 0, HEAD_DIM, PART, MASKED)
    else:
        return x[2]


@triton.jit
def dot_rows(
    a, a_tile, b, b_tile, A_BLOCK: tl.constexpr, B_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr, HALF_D: tl.constexpr, PART: tl.constexpr, STEP: tl.constexpr,
    ROPE: tl.constexpr, RESIDENT: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """``a @ b.T`` in fp32; the rows of ``a`` always MASKED."""
    if RESIDENT:
        return dot(a_tile, tl.trans(b_tile), None, PRECISION)
    else:
        product = tl.zeros([A_BLOCK, B_BLOCK], tl.float32)
        if ROPE:
            for part in tl.range(0, (HALF_D + STEP - 1) // STEP, num_stages=1):
                a_first, a_second = load_rotated(a, part, HALF_D, STEP, True)
                b_first, b_second = load_rotated(b, part, HALF_D, STEP, MASKED)
                product = dot(a_first, tl.trans(b_first), product, PRECISION)
                product = dot(a_second, tl.trans(b_second), product, PRECISION)
        else:
            for part in tl.range(0, (HEAD_DIM + STEP - 1) // STEP, num_stages=1):
                a_part = load_part(a, part, HEAD_DIM, STEP, True)
                b_part = load_part(b, part, HEAD_DIM, STEP, MASKED)
                product = dot(a_part, tl.trans(b_part), product, PRECISION)
        return product


@triton.jit
def add_products(
    accs, weights, b, b_tile,
    HEAD_DIM: tl.constexpr, HALF_D: tl.constexpr, PART: tl.constexpr,
    ROPE: tl.constexpr, RESIDENT: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """``accs + weights @ b``, part by part; the weights are rounded to the dtype of ``b``."""
    sums = ()
    if RESIDENT:
        sums = (dot(weights.to(b_tile.dtype), b_tile, accs[0], PRECISION),)
    elif ROPE:
        for part in tl.static_range((HALF_D + PART - 1) // PART):
            first, second = load_rotated(b, part, HALF_D, PART, MASKED)
            sums += (dot(weights, first, accs[2 * part], PRECISION),)
            sums += (dot(weights, second, accs[2 * part + 1], PRECISION),)
    else:
        for part in tl.static_range((HEAD_DIM + PART - 1) // PART):
            tile = load_part(b, part, HEAD_DIM, PART, MASKED)
            sums += (dot(weights.to(tile.dtype), tile, accs[part], PRECISION),)
    return sums


@triton.jit
def weighted_rows(
    weights, x, HEAD_DIM: tl.constexpr, HALF_D: tl.constexpr, PART: tl.constexpr, ROPE: tl.constexpr
):
    """An accumulator that starts with ``weights[:, None] * x``, in fp32; x comes rotated."""
    accs = ()
    if ROPE:
        for part in tl.static_range((HALF_D + PART - 1) // PART):
            first, second = load_halves(x, part, HALF_D, PART, True)
            accs += (weights[:, None] * first, weights[:, None] * second)
    else:
        for part in tl.static_range((HEAD_DIM + PART - 1) // PART):
            tile = load_part(x, part, HEAD_DIM, PART, True).to(tl.float32)
            accs += (weights[:, None] * tile,)
    return accs


@triton.jit
def row_dot(
    a, a_tile, b, BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr, HALF_D: tl.constexpr, PART: tl.constexpr, STEP: tl.constexpr,
    ROPE: tl.constexpr, RESIDENT: tl.constexpr,
):  # fmt: skip
    """Each row of ``a`` times the same row of ``b``, which comes rotated, in fp32."""
    if RESIDENT:
        tile = load_part(b, 0, HEAD_DIM, PART, True)
        return tl.sum(a_tile.to(tl.float32) * tile.to(tl.float32), 1)
    else:
        total = tl.zeros([BLOCK], tl.float32)
        if ROPE:
            for part in tl.range(0, (HALF_D + STEP - 1) // STEP, num_stages=1):
                a_first, a_second = load_rotated(a, part, HALF_D, STEP, True)
                b_first, b_second = load_halves(b, part, HALF_D, STEP, True)
                total += tl.sum(a_first * b_first + a_second * b_second, 1)
        else:
            for part in tl.range(0, (HEAD_DIM + STEP - 1) // STEP, num_stages=1):
                a_part = load_part(a, part, HEAD_DIM, STEP, True)
                total += tl.sum(a_part * load_part(b, part, HEAD_DIM, STEP, True), 1)
        return total


@triton.jit
def zeros(
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, HALF_D: tl.constexpr, PART: tl.constexpr,
    ROPE: tl.constexpr,
):  # fmt: skip
    """An accumulator that starts with nothing."""
    accs = ()
    if ROPE:
        for _ in tl.static_range(2 * ((HALF_D + PART - 1) // PART)):
            accs += (tl.zeros([BLOCK, PART], tl.float32),)
    else:
        for _ in tl.static_range((HEAD_DIM + PART - 1) // PART):
            accs += (tl.zeros([BLOCK, PART], tl.float32),)
    return accs


@triton.jit
def add_gradient(
    x, accs, scale,
    HEAD_DIM: tl.constexpr, HALF_D: tl.constexpr, PART: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Add ``scale * accs`` to the rows x in memory; with ROPE turned back by the same angle."""
    if ROPE:
        second_half = (x[0] + HALF_D, x[1], x[2], x[3])
        for part in tl.static_range((HALF_D + PART - 1) // PART):
            cos = load_part((x[4], HALF_D, x[2], x[3]), part, HALF_D, PART, True)
            sin = load_part((x[5], HALF_D, x[2], x[3]), part, HALF_D, PART, True)
            first, second = accs[2 * part] * scale, accs[2 * part + 1] * scale
            _add_part(x, part, first * cos + second * sin, HALF_D, PART)
            _add_part(second_half, part, second * cos - first * sin, HALF_D, PART)
    else:
        for part in tl.static_range((HEAD_DIM + PART - 1) // PART):
            _add_part(x, part, accs[part] * scale, HEAD_DIM, PART)


@triton.jit
def _add_part(x, part, tile, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Add to memory that this program alone owns: once to an element, so the bits are always the
    same. An atomic addition is done by the cache; a load and a store would need the registers for
    a second tile while the accumulators are still there."""
    columns = part * BLOCK + tl.arange(0, BLOCK)
    ptrs = x[0] + x[2][:, None] * x[1] + columns[None, :]
    tl.atomic_add(ptrs, tile, mask=x[3][:, None] & (columns < DIM)[None, :], sem="relaxed")
