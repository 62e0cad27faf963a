"""Flash attention backward over whole work lists: three launches, the same bits always.

With the *merged* out and lse, ``P = exp(scale q.k - lse)`` and ``delta = rowsum(dO * out)``, every
tile and the anchor contribute on their own (FlashAttention-2, arXiv 2307.08691, section 3.1.2)::

    dS = P * (dO v' - delta)    dQ = scale dS K    dK = scale dS' Q    dV = P' dO

* `prepare_kernel` reads dO and out once and leaves delta and lse as the other two want them. It
  computes the anchor's column as well (``p0``, ``ds0`` of :mod:`.merge`) with the sums for dk0 and
  dv0, in fp32 and in a fixed order: one partial sum per chunk of rows, added up by the caller.
* `dq_kernel` walks as the forward does; dq starts from the anchor's share ``ds0 k0``.
* `dkdv_kernel` owns a block of keys and walks over the queries that see it, over all query heads of
  the key head: under GQA the heads' gradients are added up in registers.

Scores are computed twice (seven products where five would do); the price of gradients that need
neither sums in a changing order nor a second pass over memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_ops import (
    LOG2E,
    VARYING,
    add_gradient,
    add_products,
    dot_rows,
    load_halves,
    load_part,
    load_resident,
    load_rotated,
    load_tile,
    weighted_rows,
    zeros,
)


@triton.jit(do_not_specialize=VARYING)
def prepare_kernel(
    dout_ptr, out_ptr, lse_ptr, q_ptr, k0_ptr, v0_ptr, q_cos_ptr, q_sin_ptr,
    chunks_ptr, delta_ptr, lse2_ptr, ds0_ptr, partial_ptr,
    num_rows, num_heads, scale,
    dout_row, dout_head, out_row, out_head, lse_row, lse_head, q_row, q_head, k0_row,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    HALF_D: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_M: tl.constexpr,
    ANCHOR: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """For every row: ``delta``, ``lse2`` = lse log2(e) (+inf where nothing was seen) and ``ds0`` of
    the anchor, each fp32 (Hq, N); for every anchored chunk its share of dk0 and dv0, ``partial``
    fp32 (C, Hq, 2, D). Grid: C * Hq programs, one a chunk and head.
    """
    chunk = tl.program_id(0) // num_heads
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    kv_head = head // GROUP
    start = tl.load(chunks_ptr + 4 * chunk)
    stop = tl.load(chunks_ptr + 4 * chunk + 1)
    anchor = tl.load(chunks_ptr + 4 * chunk + 2)
    first_row = start.to(tl.int64)
    dout_ptr += first_row * dout_row + head * dout_head
    out_ptr += first_row * out_row + head * out_head
    lse_ptr += first_row * lse_row + head * lse_head
    q_ptr += first_row * q_row + head * q_head
    q_cos_ptr += first_row * HALF_D
    q_sin_ptr += first_row * HALF_D
    row_out = head * num_rows + first_row
    columns = tl.arange(0, BLOCK_D)
    if ANCHOR:
        one = tl.arange(0, 1)
        there = one + anchor >= 0
        k0 = (k0_ptr + kv_head * HEAD_DIM, k0_row, one + anchor, there)
        if ROPE:
            k0_first, k0_second = load_halves(k0, 0, HALF_D, BLOCK_HALF, True)
            dk0_second = tl.zeros([BLOCK_HALF], tl.float32)
            dk0_first = tl.zeros([BLOCK_HALF], tl.float32)
        else:
            k0_first = load_part(k0, 0, HEAD_DIM, BLOCK_D, True).to(tl.float32)
            dk0_first = tl.zeros([BLOCK_D], tl.float32)
        v0 = load_tile(
            v0_ptr + kv_head * HEAD_DIM, k0_row, one + anchor, there, HEAD_DIM, BLOCK_D, True
        ).to(tl.float32)
        dv0 = tl.zeros([BLOCK_D], tl.float32)
    for row in range(0, stop - start, BLOCK_M):
        rows = row + tl.arange(0, BLOCK_M)
        valid = rows < stop - start
        dout = load_tile(dout_ptr, dout_row, rows, valid, HEAD_DIM, BLOCK_D, True).to(tl.float32)
        out = load_tile(out_ptr, out_row, rows, valid, HEAD_DIM, BLOCK_D, True).to(tl.float32)
        lse = tl.load(lse_ptr + rows * lse_row, mask=valid, other=float("-inf"))
        lse2 = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
        tl.store(delta_ptr + row_out + rows, tl.sum(dout * out, 1), mask=valid)
        tl.store(lse2_ptr + row_out + rows, lse2, mask=valid)
        if ANCHOR:
            q = (q_ptr, q_row, rows, valid, q_cos_ptr, q_sin_ptr)
            if ROPE:
                q_first, q_second = load_rotated(q, 0, HALF_D, BLOCK_HALF, True)
                score = tl.sum(q_first * k0_first + q_second * k0_second, 1)
            else:
                q_first = load_part(q, 0, HEAD_DIM, BLOCK_D, True).to(tl.float32)
                score = tl.sum(q_first * k0_first, 1)
            score *= scale * LOG2E
            prob = tl.where(anchor >= 0, tl.exp2(score - lse2), 0.0)
            ds0 = prob * tl.sum(dout * (v0 - out), 1)
            tl.store(ds0_ptr + row_out + rows, ds0, mask=valid)
            dv0 += tl.sum(prob[:, None] * dout, 0)
            dk0_first += tl.sum(ds0[:, None] * q_first, 0)
            if ROPE:
                dk0_second += tl.sum(ds0[:, None] * q_second, 0)
    if ANCHOR:  # noqa: SIM102 - decided when the kernel is compiled, the inner one when it runs
        if anchor >= 0:
            partial_ptr += (chunk.to(tl.int64) * num_heads + head) * (2 * HEAD_DIM)
            if ROPE:
                halves = tl.arange(0, BLOCK_HALF)
                tl.store(partial_ptr + halves, dk0_first * scale, mask=halves < HALF_D)
                tl.store(partial_ptr + HALF_D + halves, dk0_second * scale, mask=halves < HALF_D)
            else:
                tl.store(partial_ptr + columns, dk0_first * scale, mask=columns < HEAD_DIM)
            tl.store(partial_ptr + HEAD_DIM + columns, dv0, mask=columns < HEAD_DIM)


@triton.jit(do_not_specialize=VARYING)
def dq_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, k0_ptr, row_anchor_ptr,
    delta_ptr, lse2_ptr, ds0_ptr, dq_ptr,
    q_cos_ptr, q_sin_ptr, k_cos_ptr, k_sin_ptr,
    blocks_ptr, items_ptr, limits_ptr,
    num_rows, num_blocks, scale,
    dout_row, dout_head, q_row, q_head, k_row, k_head, v_row, v_head,
    dq_row, dq_head, k0_row,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HALF_D: tl.constexpr, PART: tl.constexpr,
    STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ANCHOR: tl.constexpr,
    ROPE: tl.constexpr, RESIDENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the gradient of the queries into ``dq`` (N, Hq, D), fp32; grid and list as in forward."""
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
    q_cos_ptr += first_row * HALF_D
    q_sin_ptr += first_row * HALF_D
    q_ptr += first_row * q_row + head * q_head
    dout_ptr += first_row * dout_row + head * dout_head
    q = (q_ptr, q_row, rows, valid, q_cos_ptr, q_sin_ptr)
    dout = (dout_ptr, dout_row, rows, valid)
    q_tile = load_resident(q, HEAD_DIM, PART, RESIDENT, True)
    dout_tile = load_resident(dout, HEAD_DIM, PART, RESIDENT, True)
    row_in = head * num_rows + first_row
    delta = tl.load(delta_ptr + row_in + rows, mask=valid, other=0.0)
    lse2 = tl.load(lse2_ptr + row_in + rows, mask=valid, other=float("inf"))
    k_ptr += kv_head * k_head
    v_ptr += kv_head * v_head

    if ANCHOR:
        anchor = tl.load(row_anchor_ptr + row_start + rows, mask=valid, other=-1)
        ds0 = tl.load(ds0_ptr + row_in + rows, mask=valid, other=0.0)
        k0 = (k0_ptr + kv_head * HEAD_DIM, k0_row, anchor, anchor >= 0)
        acc = weighted_rows(ds0, k0, HEAD_DIM, HALF_D, PART, ROPE)
    else:
        acc = zeros(BLOCK_M, HEAD_DIM, HALF_D, PART, ROPE)

    for item in range(item_start, item_stop):
        start = tl.load(items_ptr + 4 * item)
        full_start = tl.load(items_ptr + 4 * item + 1)
        full_stop = tl.load(items_ptr + 4 * item + 2)
        stop = tl.load(items_ptr + 4 * item + 3)
        if RESIDENT:
            for key in range(full_start, full_stop, BLOCK_N):
                acc = _add_dq(
                    acc, q, q_tile, dout, dout_tile, delta, lse2,
                    k_ptr, v_ptr, k_cos_ptr, k_sin_ptr, key, stop, 0, 0, scale, k_row, v_row,
                    HEAD_DIM, HALF_D, PART, STEP, BLOCK_M, BLOCK_N, ROPE, RESIDENT, PRECISION,
                    False,
                )  # fmt: skip
        else:  # one copy of the loop instead of two: addresses kept for both cost registers
            full_start, full_stop = start, start
        low = tl.load(limits_ptr + item * 2 * BLOCK_M + rows)
        high = tl.load(limits_ptr + item * 2 * BLOCK_M + BLOCK_M + rows)
        before = full_start - start
        for edge in tl.range(0, before + stop - full_stop, BLOCK_N, num_stages=1):
            key = tl.where(edge < before, start + edge, full_stop + edge - before)
            acc = _add_dq(
                acc, q, q_tile, dout, dout_tile, delta, lse2,
                k_ptr, v_ptr, k_cos_ptr, k_sin_ptr, key, stop, low, high, scale, k_row, v_row,
                HEAD_DIM, HALF_D, PART, STEP, BLOCK_M, BLOCK_N, ROPE, RESIDENT, PRECISION, True,
            )  # fmt: skip

    dq_ptr += first_row * dq_row + head * dq_head
    dq = (dq_ptr, dq_row, rows, valid, q_cos_ptr, q_sin_ptr)
    add_gradient(dq, acc, scale, HEAD_DIM, HALF_D, PART, ROPE)


@triton.jit
def _add_dq(
    acc, q, q_tile, dout, dout_tile, delta, lse2,
    k_ptr, v_ptr, k_cos_ptr, k_sin_ptr, key, stop, low, high, scale, k_row, v_row,
    HEAD_DIM: tl.constexpr, HALF_D: tl.constexpr, PART: tl.constexpr,
    STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ROPE: tl.constexpr, RESIDENT: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add ``dS K`` of the keys ``key : key + BLOCK_N``."""
    keys = tl.arange(0, BLOCK_N)
    inside = keys < stop - key
    first_key = tl.cast(key, tl.int64)
    k = (
        k_ptr + first_key * k_row, k_row, keys, inside,
        k_cos_ptr + first_key * HALF_D, k_sin_ptr + first_key * HALF_D,
    )  # fmt: skip
    v = (v_ptr + first_key * v_row, v_row, keys, inside)
    k_tile = load_resident(k, HEAD_DIM, PART, RESIDENT, MASKED)
    v_tile = load_resident(v, HEAD_DIM, PART, RESIDENT, MASKED)
    scores = dot_rows(
        q, q_tile, k, k_tile, BLOCK_M, BLOCK_N,
        HEAD_DIM, HALF_D, PART, STEP, ROPE, RESIDENT, PRECISION, MASKED,
    )  # fmt: skip
    probs = tl.exp2(scores * (scale * LOG2E) - lse2[:, None])
    if MASKED:
        column = (key + keys)[None, :]
        probs = tl.where((column >= low[:, None]) & (column < high[:, None]), probs, 0.0)
    dprobs = dot_rows(
        dout, dout_tile, v, v_tile, BLOCK_M, BLOCK_N,
        HEAD_DIM, HALF_D, PART, STEP, False, RESIDENT, PRECISION, MASKED,
    )  # fmt: skip
    dscores = probs * (dprobs - delta[:, None])
    return add_products(
        acc, dscores, k, k_tile, HEAD_DIM, HALF_D, PART, ROPE, RESIDENT, PRECISION, MASKED
    )


@triton.jit(do_not_specialize=VARYING)
def dkdv_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, delta_ptr, lse2_ptr, dk_ptr, dv_ptr,
    q_cos_ptr, q_sin_ptr, k_cos_ptr, k_sin_ptr,
    blocks_ptr, items_ptr, limits_ptr,
    num_queries, num_keys, num_blocks, scale,
    dout_row, dout_head, q_row, q_head, k_row, k_head, v_row, v_head,
    dk_row, dk_head, dv_row, dv_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HALF_D: tl.constexpr, PART: tl.constexpr,
    STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ROPE: tl.constexpr, RESIDENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the gradients of keys and values into ``dk`` and ``dv`` (M, Hkv, D), fp32.

    Grid: Hkv * B programs, the blocks of a key head longest first; where tiles are not RESIDENT
    twice as many, of which one computes dk and the next dv, because what both keep are more
    registers than there are. Everything is computed transposed, keys down and queries
    across, so that the products that add up start from registers.
    """
    program = tl.program_id(0)
    if not RESIDENT:
        program //= 2
    block = program % num_blocks
    kv_head = (program // num_blocks).to(tl.int64)
    key_start = tl.load(blocks_ptr + 4 * block)
    item_start = tl.load(blocks_ptr + 4 * block + 1)
    item_stop = tl.load(blocks_ptr + 4 * block + 2)

    keys = tl.arange(0, BLOCK_N)
    valid = keys < num_keys - key_start
    first_key = key_start.to(tl.int64)
    k_cos_ptr += first_key * HALF_D
    k_sin_ptr += first_key * HALF_D
    k = (k_ptr + first_key * k_row + kv_head * k_head, k_row, keys, valid, k_cos_ptr, k_sin_ptr)
    v = (v_ptr + first_key * v_row + kv_head * v_head, v_row, keys, valid)
    dk_ptr += first_key * dk_row + kv_head * dk_head
    dk = (dk_ptr, dk_row, keys, valid, k_cos_ptr, k_sin_ptr)
    dv = (dv_ptr + first_key * dv_row + kv_head * dv_head, dv_row, keys, valid)
    q_ptr += kv_head * GROUP * q_head
    dout_ptr += kv_head * GROUP * dout_head
    delta_ptr += kv_head * GROUP * num_queries
    lse2_ptr += kv_head * GROUP * num_queries
    if RESIDENT:
        _key_block(
            k, v, dk, dv, q_ptr, dout_ptr, delta_ptr, lse2_ptr, q_cos_ptr, q_sin_ptr,
            items_ptr, limits_ptr, item_start, item_stop,
            num_queries, scale, q_row, q_head, dout_row, dout_head,
            GROUP, HEAD_DIM, HALF_D, PART, STEP, BLOCK_M, BLOCK_N, ROPE, RESIDENT, PRECISION,
            True, True,
        )  # fmt: skip
    elif tl.program_id(0) % 2 == 0:
        _key_block(
            k, v, dk, dv, q_ptr, dout_ptr, delta_ptr, lse2_ptr, q_cos_ptr, q_sin_ptr,
            items_ptr, limits_ptr, item_start, item_stop,
            num_queries, scale, q_row, q_head, dout_row, dout_head,
            GROUP, HEAD_DIM, HALF_D, PART, STEP, BLOCK_M, BLOCK_N, ROPE, RESIDENT, PRECISION,
            True, False,
        )  # fmt: skip
    else:
        _key_block(
            k, v, dk, dv, q_ptr, dout_ptr, delta_ptr, lse2_ptr, q_cos_ptr, q_sin_ptr,
            items_ptr, limits_ptr, item_start, item_stop,
            num_queries, scale, q_row, q_head, dout_row, dout_head,
            GROUP, HEAD_DIM, HALF_D, PART, STEP, BLOCK_M, BLOCK_N, ROPE, RESIDENT, PRECISION,
            False, True,
        )  # fmt: skip


@triton.jit
def _key_block(
    k, v, dk, dv, q_ptr, dout_ptr, delta_ptr, lse2_ptr, q_cos_ptr, q_sin_ptr,
    items_ptr, limits_ptr, item_start, item_stop,
    num_queries, scale, q_row, q_head, dout_row, dout_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HALF_D: tl.constexpr, PART: tl.constexpr,
    STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ROPE: tl.constexpr, RESIDENT: tl.constexpr, PRECISION: tl.constexpr,
    WITH_DK: tl.constexpr, WITH_DV: tl.constexpr,
):  # fmt: skip
    """Add to dk, to dv or to both of one block of keys, from the GROUP query heads that read it."""
    keys = tl.arange(0, BLOCK_N)
    k_tile = load_resident(k, HEAD_DIM, PART, RESIDENT, True)
    v_tile = load_resident(v, HEAD_DIM, PART, RESIDENT, True)
    dk_acc, dv_acc = (), ()
    if WITH_DK:
        dk_acc = zeros(BLOCK_N, HEAD_DIM, HALF_D, PART, ROPE)
    if WITH_DV:
        dv_acc = zeros(BLOCK_N, HEAD_DIM, HALF_D, PART, False)
    num_items = item_stop - item_start
    for walk in range(GROUP * num_items):
        item = item_start + walk % num_items
        head = (walk // num_items).to(tl.int64)
        head_q = q_ptr + head * q_head
        head_dout = dout_ptr + head * dout_head
        head_delta = delta_ptr + head * num_queries
        head_lse2 = lse2_ptr + head * num_queries
        start = tl.load(items_ptr + 4 * item)
        full_start = tl.load(items_ptr + 4 * item + 1)
        full_stop = tl.load(items_ptr + 4 * item + 2)
        stop = tl.load(items_ptr + 4 * item + 3)
        if RESIDENT:
            for row in range(full_start, full_stop, BLOCK_M):
                dk_acc, dv_acc = _add_dkdv(
                    dk_acc, dv_acc, k, k_tile, v, v_tile,
                    head_q, head_dout, head_delta, head_lse2, q_cos_ptr, q_sin_ptr,
                    row, stop, 0, 0, scale, q_row, dout_row,
                    HEAD_DIM, HALF_D, PART, STEP, BLOCK_M, BLOCK_N, ROPE, RESIDENT, PRECISION,
                    WITH_DK, WITH_DV, False,
                )  # fmt: skip
        else:  # one copy of the loop instead of two: addresses kept for both cost registers
            full_start, full_stop = start, start
        low = tl.load(limits_ptr + item * 2 * BLOCK_N + keys)
        high = tl.load(limits_ptr + item * 2 * BLOCK_N + BLOCK_N + keys)
        before = full_start - start
        for edge in tl.range(0, before + stop - full_stop, BLOCK_M, num_stages=1):
            row = tl.where(edge < before, start + edge, full_stop + edge - before)
            dk_acc, dv_acc = _add_dkdv(
                dk_acc, dv_acc, k, k_tile, v, v_tile,
                head_q, head_dout, head_delta, head_lse2, q_cos_ptr, q_sin_ptr,
                row, stop, low, high, scale, q_row, dout_row,
                HEAD_DIM, HALF_D, PART, STEP, BLOCK_M, BLOCK_N, ROPE, RESIDENT, PRECISION,
                WITH_DK, WITH_DV, True,
            )  # fmt: skip
    if WITH_DV:
        add_gradient(dv, dv_acc, 1.0, HEAD_DIM, HALF_D, PART, False)
    if WITH_DK:
        add_gradient(dk, dk_acc, scale, HEAD_DIM, HALF_D, PART, ROPE)


@triton.jit
def _add_dkdv(
    dk_acc, dv_acc, k, k_tile, v, v_tile,
    q_ptr, dout_ptr, delta_ptr, lse2_ptr, q_cos_ptr, q_sin_ptr,
    row, stop, low, high, scale, q_row, dout_row,
    HEAD_DIM: tl.constexpr, HALF_D: tl.constexpr, PART: tl.constexpr,
    STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ROPE: tl.constexpr, RESIDENT: tl.constexpr, PRECISION: tl.constexpr,
    WITH_DK: tl.constexpr, WITH_DV: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add ``dS' Q`` and ``P' dO`` of the queries ``row : row + BLOCK_M``."""
    rows = tl.arange(0, BLOCK_M)
    inside = rows < stop - row
    first_row = tl.cast(row, tl.int64)
    q = (
        q_ptr + first_row * q_row, q_row, rows, inside,
        q_cos_ptr + first_row * HALF_D, q_sin_ptr + first_row * HALF_D,
    )  # fmt: skip
    dout = (dout_ptr + first_row * dout_row, dout_row, rows, inside)
    q_tile = load_resident(q, HEAD_DIM, PART, RESIDENT, MASKED)
    dout_tile = load_resident(dout, HEAD_DIM, PART, RESIDENT, MASKED)
    if MASKED:
        lse2 = tl.load(lse2_ptr + first_row + rows, mask=inside, other=float("inf"))
        delta = tl.load(delta_ptr + first_row + rows, mask=inside, other=0.0)
    else:
        lse2 = tl.load(lse2_ptr + first_row + rows)
        delta = tl.load(delta_ptr + first_row + rows)
    scores = dot_rows(
        k, k_tile, q, q_tile, BLOCK_N, BLOCK_M,
        HEAD_DIM, HALF_D, PART, STEP, ROPE, RESIDENT, PRECISION, MASKED,
    )  # fmt: skip
    probs = tl.exp2(scores * (scale * LOG2E) - lse2[None, :])
    if MASKED:
        query = (row + rows)[None, :]
        probs = tl.where((query >= low[:, None]) & (query < high[:, None]), probs, 0.0)
    if WITH_DV:
        dv_acc = add_products(
            dv_acc, probs, dout, dout_tile,
            HEAD_DIM, HALF_D, PART, False, RESIDENT, PRECISION, MASKED,
        )  # fmt: skip
    if WITH_DK:
        dprobs = dot_rows(
            v, v_tile, dout, dout_tile, BLOCK_N, BLOCK_M,
            HEAD_DIM, HALF_D, PART, STEP, False, RESIDENT, PRECISION, MASKED,
        )  # fmt: skip
        dscores = probs * (dprobs - delta[None, :])
        dk_acc = add_products(
            dk_acc, dscores, q, q_tile,
            HEAD_DIM, HALF_D, PART, ROPE, RESIDENT, PRECISION, MASKED,
        )  # fmt: skip
    return dk_acc, dv_acc
