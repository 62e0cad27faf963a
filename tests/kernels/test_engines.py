"""Every engine computes exactly the attention of its tile list, forward and backward."""

from __future__ import annotations

import contextlib
import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from anchorcontext.kernels import SoftmaxState, Tiles, cpu_library, engine_report, get_engine

# The others have files of their own.
ENGINE_NAMES = [
    name
    for name, reason in engine_report(torch.device("cpu"), torch.float64).items()
    if reason is None
]
HEADS = [(4, 4), (4, 2), (9, 3), (4, 1)]
SCALE = 0.3  # not D ** -0.5, which operators take when a scale is lost
# fp64, fp32: largest error against fp64, on values of order 1. bf16: error norm over norm, about
# the rounding of the output (2^-9 at most) and of the probabilities.
LARGEST_ERROR = {torch.float64: 1e-12, torch.float32: 1e-5}
RELATIVE_ERROR = {torch.bfloat16: 5e-3}


def run(
    name, x, tiles, forward_parts=None, backward_parts=None, out_dtype=None, exact=False
) -> SimpleNamespace:
    """Forward and backward of one engine; ``*_parts`` are tile lists given in separate calls."""
    engine = get_engine(name, device=x.q.device, dtype=x.q.dtype)
    state = SoftmaxState.empty(x.q)
    for part in forward_parts or [tiles]:
        engine.forward(x.q, x.k, x.v, Tiles(part, exact), SCALE, state)
    dq, dk, dv = (torch.zeros(y.shape, dtype=state.out.dtype) for y in (x.q, x.k, x.v))
    out = state.out.to(out_dtype or x.q.dtype)
    for part in backward_parts or [tiles]:
        args = (x.dout, x.q, x.k, x.v, out, state.lse, Tiles(part, exact), SCALE)
        engine.backward(*args, dq, dk, dv)
    return SimpleNamespace(out=state.out, lse=state.lse, dq=dq, dk=dk, dv=dv)


def rows_of(tiles) -> tuple[int, int]:
    """(N, M): two rows more than the tiles touch."""
    array = np.asarray(tiles)
    return int(array[:, 1].max()) + 2, int(array[:, 3].max()) + 2


def assert_close(found, expected, dtype) -> None:
    assert torch.equal(found.lse == -math.inf, expected.lse == -math.inf)
    assert found.lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    seen = expected.lse != -math.inf
    pairs = {name: (getattr(found, name), getattr(expected, name)) for name in vars(expected)}
    pairs["lse"] = (found.lse[seen], expected.lse[seen])
    for name, (a, b) in pairs.items():
        error = a.double() - b
        assert torch.isfinite(error).all(), name
        if dtype in LARGEST_ERROR:
            assert error.abs().max() <= LARGEST_ERROR[dtype], name
        else:
            assert error.norm() <= RELATIVE_ERROR[dtype] * b.norm(), name


@pytest.mark.parametrize("heads", HEADS, ids=lambda h: f"{h[0]}q{h[1]}kv")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ENGINE_NAMES)
def test_engine_equals_dense_autograd(name, dtype, heads, tile_list, oracle):
    num_queries, num_keys = rows_of(tile_list)
    x = oracle.inputs(num_queries, num_keys, heads, dtype)
    visible = oracle.visible(tile_list, num_queries, num_keys)
    expected = oracle.attention(x.q, x.k, x.v, x.dout, visible, SCALE)
    assert_close(run(name, x, tile_list), expected, dtype)


@st.composite
def disjoint_tiles(draw):
    """Cells of a random grid over the (query, key) plane, each absent, full or causal."""
    q_cuts = [0, *sorted(draw(st.sets(st.integers(1, 40), min_size=1, max_size=6)))]
    k_cuts = [0, *sorted(draw(st.sets(st.integers(1, 40), min_size=1, max_size=6)))]
    tiles = []
    for q_start, q_stop in pairwise(q_cuts):
        for k_start, k_stop in pairwise(k_cuts):
            kinds = (None, 0, 1) if k_stop - k_start >= q_stop - q_start else (None, 0)
            kind = draw(st.sampled_from(kinds))
            if kind is not None:
                tiles.append((q_start, q_stop, k_start, k_stop, kind))
    return draw(st.permutations(tiles or [(0, 1, 0, 1, 1)]))


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(tiles=disjoint_tiles(), heads=st.sampled_from(HEADS))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", ENGINE_NAMES)
def test_engine_equals_dense_autograd_on_random_tiles(name, dtype, tiles, heads, oracle):
    num_queries, num_keys = rows_of(tiles)
    x = oracle.inputs(num_queries, num_keys, heads, dtype)
    visible = oracle.visible(tiles, num_queries, num_keys)
    assert Tiles(tiles).num_pairs == visible.sum()
    expected = oracle.attention(x.q, x.k, x.v, x.dout, visible, SCALE)
    assert_close(run(name, x, tiles), expected, dtype)


@pytest.mark.parametrize("name", ENGINE_NAMES)
def test_calls_over_parts_add_up_to_one_call(name, oracle):
    tiles = [(0, 30, 0, 20, 0), (0, 30, 20, 60, 1), (8, 9, 60, 64, 0), (40, 50, 50, 60, 1)]
    x = oracle.inputs(52, 66, (4, 2), torch.float64)
    whole = run(name, x, tiles)
    steps = run(name, x, tiles, [tiles[2:], tiles[:2]], [tiles[1:2], tiles[2:], tiles[:1]])
    assert_close(steps, whole, torch.float64)


@pytest.mark.parametrize("name", ENGINE_NAMES)
def test_gradients_are_added_to_what_is_there(name, oracle):
    x = oracle.inputs(12, 12, (4, 2), torch.float64)
    tiles = Tiles([(0, 12, 0, 12, 1)])
    once = run(name, x, tiles.array)
    engine = get_engine(name, device=x.q.device, dtype=x.q.dtype)
    grads = [torch.ones_like(y) for y in (x.q, x.k, x.v)]
    engine.backward(x.dout, x.q, x.k, x.v, once.out, once.lse, tiles, SCALE, *grads)
    for grad, expected in zip(grads, (once.dq, once.dk, once.dv), strict=True):
        assert torch.allclose(grad - 1, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ENGINE_NAMES)
def test_inputs_may_be_strided_views(name, oracle, tile_list):
    num_queries, num_keys = rows_of(tile_list)
    x = oracle.inputs(num_queries, num_keys, (4, 2), torch.float64)
    expected = run(name, x, tile_list)
    head_major = {y: getattr(x, y).transpose(0, 1).contiguous().transpose(0, 1) for y in vars(x)}
    assert_close(run(name, SimpleNamespace(**head_major), tile_list), expected, torch.float64)
    fused = torch.cat([x.k, x.v], dim=1)
    views = SimpleNamespace(q=x.q, dout=x.dout, k=fused[:, :2], v=fused[:, 2:])
    assert_close(run(name, views, tile_list), expected, torch.float64)


@pytest.mark.parametrize("name", ENGINE_NAMES)
def test_backward_is_zero_where_the_lse_says_that_nothing_was_seen(name, oracle):
    x = oracle.inputs(8, 8, (4, 2), torch.float32)
    engine = get_engine(name, device=x.q.device, dtype=x.q.dtype)
    state = SoftmaxState.empty(x.q)
    grads = [torch.zeros_like(y) for y in (x.q, x.k, x.v)]
    tiles = Tiles([(0, 8, 0, 8, 1)])
    engine.backward(x.dout, x.q, x.k, x.v, state.out, state.lse, tiles, SCALE, *grads)
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


@pytest.mark.parametrize("name", ENGINE_NAMES)
def test_bf16_error_does_not_grow_with_the_number_of_splits(name, oracle):
    num_rows = 256
    x = oracle.inputs(num_rows, num_rows, (4, 2), torch.bfloat16, head_dim=64)
    visible = torch.ones(num_rows, num_rows, dtype=torch.bool)
    expected = oracle.attention(x.q, x.k, x.v, x.dout, visible, SCALE)
    errors = {}
    for splits in (1, 2, 4, 16):
        width = num_rows // splits
        tiles = [(0, num_rows, a, a + width, 0) for a in range(0, num_rows, width)]
        found = run(name, x, tiles)
        found.out = found.out.bfloat16()
        errors[splits] = {
            key: float((getattr(found, key).double() - value).norm() / value.norm())
            for key, value in vars(expected).items()
        }
    for key in vars(expected):
        # A split may round each partial output to bf16 once; lse and dv stay near fp32.
        assert errors[2][key] <= max(2 * errors[1][key], 5e-5), (key, errors)
        assert errors[16][key] <= max(1.2 * errors[2][key], 5e-5), (key, errors)


class TestCpuEngine:
    """What the CPU engine promises beyond the interface."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_one_tile_is_the_operator_result_bit_for_bit(self, dtype, oracle):
        length = 1100  # longer than what the kernel for short tiles takes
        x = oracle.inputs(length, length, (4, 2), dtype, head_dim=64)
        batched = [y.transpose(0, 1).unsqueeze(0) for y in (x.q, x.k, x.v)]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *batched, 0.0, True, scale=SCALE
        )
        found = run("cpu", x, [(0, length, 0, length, 1)])
        assert torch.equal(found.out, out[0].transpose(0, 1).float())
        assert torch.equal(found.lse, lse[0].T)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
    def test_a_batched_tile_has_the_bits_of_its_own_call(self, dtype, oracle):
        x = oracle.inputs(120, 120, (9, 3), dtype, head_dim=64)
        tiles = [(0, 37, 0, 37, 1), (37, 50, 37, 50, 1), (50, 87, 50, 87, 1), (90, 120, 90, 120, 1)]
        together = run("cpu", x, tiles)
        apart = run("cpu", x, tiles, [[t] for t in tiles], [[t] for t in tiles])
        for key, value in vars(together).items():
            assert torch.equal(value, getattr(apart, key)), key

    def test_small_equal_tiles_share_operator_calls(self, monkeypatch, oracle):
        calls = []
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

        def counted(*args, **kwargs):
            calls.append(args[0].shape)
            return operator(*args, **kwargs)

        monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", counted)
        # In fp64, which the kernel for short tiles does not take.
        x = oracle.inputs(1000 * 4, 1000 * 4, (2, 1), torch.float64, head_dim=8)
        tiles = Tiles([(a, a + 4, a, a + 4, 1) for a in range(0, 4000, 4)])
        engine = get_engine("cpu", device=x.q.device, dtype=x.q.dtype)
        engine.forward(x.q, x.k, x.v, tiles, SCALE, SoftmaxState.empty(x.q))
        assert len(calls) == 1

    def test_no_score_matrix_is_allocated(self, oracle):
        length = 16384  # one fp32 score matrix: 1 GiB
        clear, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
        try:
            clear.write_text("5")  # resets the peak to the memory in use
        except OSError:
            pytest.skip("needs Linux's resettable peak-memory counter")

        def peak_kib() -> int:
            line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
            return int(line.split()[1])

        before = peak_kib()
        x = oracle.inputs(length, length, (1, 1), torch.float32, head_dim=8)
        found = run("cpu", x, [(0, length, 0, length, 1)])
        assert torch.isfinite(found.dk).all()
        assert peak_kib() - before < 64 * 1024


def test_tiles_refuse_what_no_engine_should_see():
    for bad in [(0, 0, 0, 1, 0), (0, 1, 2, 2, 0), (-1, 1, 0, 2, 0), (0, 3, 0, 2, 1)]:
        with pytest.raises(AssertionError):
            Tiles([bad])
    with pytest.raises(AssertionError, match="an exact tile is causal"):
        Tiles([(0, 1, 0, 2, 0)], exact=True)


def exact_pieces(cuts, k_start=3):
    """One document of ``cuts[-1]`` tokens, its queries cut at ``cuts`` and scattered over rows with
    gaps between; the keys of each piece from the document's first on."""
    tiles, row = [], 2
    for first, stop in pairwise(cuts):
        tiles.append((row, row + stop - first, k_start, k_start + stop, 1))
        row += stop - first + 1
    return tiles


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_exact_tiles_equal_the_oracle(oracle, dtype):
    tiles = [*exact_pieces((0, 1, 70, 300)), (330, 333, 310, 313, 1), (333, 433, 313, 413, 1)]
    x = oracle.inputs(*rows_of(tiles), (4, 2), dtype)
    visible = oracle.visible(tiles, len(x.q), len(x.k))
    expected = oracle.attention(x.q, x.k, x.v, x.dout, visible, SCALE)
    assert_close(run("cpu", x, tiles, exact=True), expected, dtype)


@pytest.mark.parametrize("compiled", [True, False], ids=["kernel", "torch"])
@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(1, 1500),
    cuts=st.lists(st.integers(1, 1499), max_size=3),
    heads=st.sampled_from(HEADS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@example(length=3100, cuts=[1030, 2500], heads=(2, 1), dtype=torch.float32)
def test_exact_rows_have_the_same_bits_however_a_document_is_cut(
    compiled, oracle, length, cuts, heads, dtype
):
    cuts = sorted({0, length, *(cut for cut in cuts if cut < length)})
    rows = oracle.inputs(length, length + 3, heads, dtype)
    whole, parts = (exact_pieces(edges) for edges in ((0, length), cuts))
    found = []
    for tiles in (whole, parts):
        q = torch.full((rows_of(tiles)[0], *rows.q.shape[1:]), math.nan, dtype=dtype)
        held = torch.cat([torch.arange(a, b) for a, b, *_ in tiles])
        q[held] = rows.q
        state = SoftmaxState.empty(q)
        engine = get_engine("cpu", device=q.device, dtype=dtype, exact=True)
        off = mock.patch.object(cpu_library, "_missing", lambda: "switched off by a test")
        with contextlib.nullcontext() if compiled else off:
            engine.forward(q, rows.k, rows.v, Tiles(tiles, exact=True), SCALE, state)
        found.append((state.out[held], state.lse[held]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
