"""Flash attention forward over a whole work list in one launch, the anchor included.

One program computes one query block for one head: it takes up the online-softmax state of its rows,
lets the anchor in as a first key that never leaves the registers, walks over the block's items and
puts the state back.

**The state between calls.** The online softmax carries (m, l, acc): a reference maximum, the sum
``l = sum exp(s_j - m)`` and ``acc = sum exp(s_j - m) v_j``, each in fp32; (m, l, acc) and
(m + c, l exp(-c), acc exp(-c)) are the same state for every c. Between calls we keep the member of
that family with l = 1: ``(m, l, acc) = (lse, 1, out)`` with ``lse = m + log l`` and
``out = acc / l``, which is `SoftmaxState`. Putting a state down and taking it up again therefore
changes neither what is computed nor the number of passes; it costs one rounding of ``acc / l``
(half a unit in the last place of fp32) and one of ``lse``. The latter scales all earlier weights by
``exp(e)``, ``|e| <= |lse| 2^-23``, no more than the rounding of a single score of the size of lse
does to its weight. An exchange of P steps adds P such roundings in fp32, far below the one rounding
of the probabilities to bf16; nothing is ever rounded to the dtype of q in between (Milakov and
Gimelshein, arXiv 1805.02867; Dao, arXiv 2307.08691, section 3.1).

**The anchor** is a block of one key, ``s0 = scale q.k0``, value v0: it enters by the same update as
any other block before the first item, so no iteration is spent on it.

A row that no item and no anchor shows a key keeps its state bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_ops import (
    LN2,
    LOG2E,
    VARYING,
    add_products,
    dot_rows,
    load_part,
    load_resident,
    row_dot,
)


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    k0_ptr, v0_ptr, row_anchor_ptr,
    q_cos_ptr, q_sin_ptr, k_cos_ptr, k_sin_ptr,
    blocks_ptr, items_ptr, limits_ptr,
    num_rows, num_blocks, scale,
    q_row, q_head, k_row, k_head, v_row, v_head,
    out_row, out_head, lse_row, lse_head, k0_row,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HALF_D: tl.constexpr, PART: tl.constexpr,
    STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ANCHOR: tl.constexpr,
    ROPE: tl.constexpr, RESIDENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Merge the work list's attention into ``out`` (N, Hq, D) and ``lse`` (N, Hq), fp32.

    Grid: Hkv * B * GROUP programs. The heads of a group run side by side and share their keys in
    the L2 cache; the blocks of a key head come longest first.
    """
    program = tl.program_id(0)
    block = (program // GROUP) % num_blocks
    kv_head = (program // (GROUP * num_blocks)).to(tl.int64)
    head = kv_head * GROUP + program % GROUP
    row_start = tl.load(blocks_ptr + 4 * block)
    item_start = tl.load(blocks_ptr + 4 * block + 1)
    item_stop = tl.load(blocks_ptr + 4 * block + 2)

    rows = tl.arange(0, BLOCK_M)
    valid = rows < num_rows - row_start
    first_row = row_start.to(tl.int64)
    q = (
        q_ptr + first_row * q_row + head * q_head, q_row, rows, valid,
        q_cos_ptr + first_row * HALF_D, q_sin_ptr + first_row * HALF_D,
    )  # fmt: skip
    q_tile = load_resident(q, HEAD_DIM, PART, RESIDENT, True)
    out = (out_ptr + first_row * out_row + head * out_head, out_row, rows, valid)
    lse_ptr += first_row * lse_row + head * lse_head
    k_ptr += kv_head * k_head
    v_ptr += kv_head * v_head

    scale_log2 = scale * LOG2E
    touched = rows < 0
    top = tl.load(lse_ptr + rows * lse_row, mask=valid, other=float("-inf")) * LOG2E
    total = tl.where(top == float("-inf"), 0.0, 1.0)
    if ANCHOR:
        anchor = tl.load(row_anchor_ptr + row_start + rows, mask=valid, other=-1)
        touched = anchor >= 0
        k0 = (k0_ptr + kv_head * HEAD_DIM, k0_row, anchor, touched)
        v0 = (v0_ptr + kv_head * HEAD_DIM, k0_row, anchor, touched)
        score = row_dot(q, q_tile, k0, BLOCK_M, HEAD_DIM, HALF_D, PART, STEP, ROPE, RESIDENT)
        score = tl.where(touched, score * scale_log2, float("-inf"))
        new_top = tl.maximum(top, score)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight, keep = tl.exp2(score - shift), tl.exp2(top - shift)
        total = total * keep + weight
        top = new_top
    acc = ()
    for part in tl.static_range((HEAD_DIM + PART - 1) // PART):
        tile = load_part(out, part, HEAD_DIM, PART, True)
        if ANCHOR:
            v0_part = load_part(v0, part, HEAD_DIM, PART, True).to(tl.float32)
            tile = tile * keep[:, None] + weight[:, None] * v0_part
        acc += (tile,)

    for item in range(item_start, item_stop):
        start = tl.load(items_ptr + 4 * item)
        full_start = tl.load(items_ptr + 4 * item + 1)
        full_stop = tl.load(items_ptr + 4 * item + 2)
        stop = tl.load(items_ptr + 4 * item + 3)
        if RESIDENT:
            for key in range(full_start, full_stop, BLOCK_N):
                acc, top, total = _attend(
                    acc, top, total, q, q_tile, k_ptr, v_ptr, k_cos_ptr, k_sin_ptr,
                    key, stop, 0, 0, scale_log2, k_row, v_row,
                    HEAD_DIM, HALF_D, PART, STEP, BLOCK_M, BLOCK_N, ROPE, RESIDENT, PRECISION,
                    False,
                )  # fmt: skip
        else:  # one copy of the loop instead of two: addresses kept for both cost registers
            full_start, full_stop = start, start
        low = tl.load(limits_ptr + item * 2 * BLOCK_M + rows)
        high = tl.load(limits_ptr + item * 2 * BLOCK_M + BLOCK_M + rows)
        touched = touched | (high > low)
        before = full_start - start
        for edge in tl.range(0, before + stop - full_stop, BLOCK_N, num_stages=1):
            key = tl.where(edge < before, start + edge, full_stop + edge - before)
            acc, top, total = _attend(
                acc, top, total, q, q_tile, k_ptr, v_ptr, k_cos_ptr, k_sin_ptr,
                key, stop, low, high, scale_log2, k_row, v_row,
                HEAD_DIM, HALF_D, PART, STEP, BLOCK_M, BLOCK_N, ROPE, RESIDENT, PRECISION, True,
            )  # fmt: skip

    keep_row = valid & touched
    divisor = tl.where(total == 0.0, 1.0, total)
    for part in tl.static_range((HEAD_DIM + PART - 1) // PART):
        columns = part * PART + tl.arange(0, PART)
        inside = keep_row[:, None] & (columns < HEAD_DIM)[None, :]
        out_ptrs = out[0] + rows[:, None] * out_row + columns[None, :]
        tl.store(out_ptrs, acc[part] / divisor[:, None], mask=inside)
    tl.store(lse_ptr + rows * lse_row, (top + tl.log2(divisor)) * LN2, mask=keep_row)


@triton.jit
def _attend(
    acc, top, total, q, q_tile, k_ptr, v_ptr, k_cos_ptr, k_sin_ptr,
    key, stop, low, high, scale_log2, k_row, v_row,
    HEAD_DIM: tl.constexpr, HALF_D: tl.constexpr, PART: tl.constexpr,
    STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ROPE: tl.constexpr, RESIDENT: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One online-softmax update with the keys ``key : key + BLOCK_N``; base-2 exponents."""
    keys = tl.arange(0, BLOCK_N)
    inside = keys < stop - key
    first_key = tl.cast(key, tl.int64)
    k = (
        k_ptr + first_key * k_row, k_row, keys, inside,
        k_cos_ptr + first_key * HALF_D, k_sin_ptr + first_key * HALF_D,
    )  # fmt: skip
    k_tile = load_resident(k, HEAD_DIM, PART, RESIDENT, MASKED)
    scores = dot_rows(
        q, q_tile, k, k_tile, BLOCK_M, BLOCK_N,
        HEAD_DIM, HALF_D, PART, STEP, ROPE, RESIDENT, PRECISION, MASKED,
    )  # fmt: skip
    scores *= scale_log2
    if MASKED:
        column = (key + keys)[None, :]
        scores = tl.where(
            (column >= low[:, None]) & (column < high[:, None]), scores, float("-inf")
        )
    new_top = tl.maximum(top, tl.max(scores, 1))
    shift = new_top
    if MASKED:  # a row may not have seen a key yet, and -inf - -inf is nan
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    probs = tl.exp2(scores - shift[:, None])
    keep = tl.exp2(top - shift)
    v = (v_ptr + first_key * v_row, v_row, keys, inside)
    kept = ()
    for part in tl.static_range((HEAD_DIM + PART - 1) // PART):
        kept += (acc[part] * keep[:, None],)
    v_tile = load_resident(v, HEAD_DIM, PART, RESIDENT, MASKED)
    acc = add_products(
        kept, probs, v, v_tile, HEAD_DIM, HALF_D, PART, False, RESIDENT, PRECISION, MASKED
    )
    return acc, new_top, total * keep + tl.sum(probs, 1)
