"""The CPU engine's kernel for short tiles: against the oracle, and what the operator keeps."""

from __future__ import annotations

import math
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anchorcontext.kernels import (
    SoftmaxState,
    Tiles,
    anchor_backward_,
    anchor_forward_,
    compiled,
    cpu_library,
    cpu_short,
    get_engine,
)

CPU = torch.device("cpu")
LARGEST = {torch.float32: 2e-5}
NORM = {torch.bfloat16: 5e-3}

pytestmark = pytest.mark.usefixtures("c_kernels")


def compute(x, tiles, scale, state=None) -> SimpleNamespace:
    """Forward and backward of the engine."""
    engine = get_engine("cpu", device=CPU, dtype=x.q.dtype)
    tiles = Tiles(tiles)
    state = state or SoftmaxState.empty(x.q)
    engine.forward(x.q, x.k, x.v, tiles, scale, state)
    dq, dk, dv = (torch.zeros(y.shape, dtype=state.out.dtype) for y in (x.q, x.k, x.v))
    engine.backward(
        x.dout, x.q, x.k, x.v, state.out.to(x.q.dtype), state.lse, tiles, scale, dq, dk, dv
    )
    return SimpleNamespace(out=state.out, lse=state.lse, dq=dq, dk=dk, dv=dv)


def assert_close(found, expected, dtype) -> None:
    for name, wanted in vars(expected).items():
        error = getattr(found, name).double() - wanted
        error = error[torch.isfinite(wanted)]
        assert torch.isfinite(error).all(), name
        if dtype in LARGEST:
            assert error.abs().max() <= LARGEST[dtype], name
        else:
            allowed = NORM[dtype] * wanted[torch.isfinite(wanted)].norm()
            assert error.norm() <= max(allowed, 1e-5), name


def documents(lengths, gap=0):
    starts = np.cumsum([0, *(n + gap for n in lengths)])[:-1].tolist()
    return [(a, a + n, a, a + n, 1) for a, n in zip(starts, lengths, strict=True)]


def rows_of(tiles) -> tuple[int, int]:
    array = np.asarray(tiles)
    return int(array[:, 1].max()), int(array[:, 3].max())


def bits(found) -> list[torch.Tensor]:
    return list(vars(found).values())


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    gap=st.integers(0, 2),
    head_dim=st.sampled_from([1, 5, 16, 40, 64, 96, 128, 256]),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_documents_of_any_length_and_head_dimension(oracle, lengths, gap, head_dim, heads, dtype):
    tiles = documents(lengths, gap)
    x = oracle.inputs(*rows_of(tiles), heads, dtype, head_dim=head_dim)
    visible = oracle.visible(tiles, len(x.q), len(x.k))
    scale = head_dim**-0.5
    expected = oracle.attention(x.q, x.k, x.v, x.dout, visible, scale)
    assert_close(compute(x, tiles, scale), expected, dtype)


@pytest.mark.parametrize("tile", [(0, 1024, 0, 1024, 1), (0, 7, 0, 1024, 1), (0, 1000, 0, 17, 0)])
def test_the_longest_tiles_it_takes(oracle, tile):
    x = oracle.inputs(tile[1], tile[3], (2, 1), torch.float32, head_dim=24)
    visible = oracle.visible([tile], len(x.q), len(x.k))
    short, rest = cpu_short.split(Tiles([tile]))
    assert short is not None and not len(rest)
    expected = oracle.attention(x.q, x.k, x.v, x.dout, visible, 0.2)
    assert_close(compute(x, [tile], 0.2), expected, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_the_kernel_the_operator_computes_the_same(no_c_kernels, oracle, tile_list, dtype):
    num_queries, num_keys = rows_of(tile_list)
    x = oracle.inputs(num_queries, num_keys, (4, 2), dtype)
    visible = oracle.visible(tile_list, num_queries, num_keys)
    expected = oracle.attention(x.q, x.k, x.v, x.dout, visible, 0.3)
    assert_close(compute(x, tile_list, 0.3), expected, dtype)


def test_it_takes_cpu_kernels_and_leaves_the_long_ones():
    short = [(0, 1024, 0, 1024, 1), (1030, 1031, 5, 1000, 1), (1000, 1024, 2000, 3024, 0)]
    long = [(1100, 2125, 1100, 2125, 1), (3000, 3001, 0, 1025, 1)]
    taken, rest = cpu_short.split(Tiles([long[0], *short, long[1]]))
    assert taken.array.tolist() == [list(tile) for tile in short]
    assert rest.array.tolist() == [list(tile) for tile in long]


def test_clusters_share_no_row():
    chain = [(0, 5, 0, 9, 1), (4, 8, 100, 110, 0), (60, 70, 109, 119, 0)]  # by query, then by key
    inside = [(20, 40, 20, 40, 1), (25, 26, 200, 203, 0), (30, 31, 210, 213, 0)]
    alone = [(8, 20, 9, 21, 1), (40, 41, 119, 120, 1)]
    tiles = cpu_short.ShortTiles(np.array([*chain, *inside, *alone]))
    a, b, c, d, e, f, g, h = tiles.clusters.tolist()
    assert a == b == c
    assert d == e == f == g  # the keys 9:21 of g reach into 20:40
    assert len({a, d, h}) == 3


def test_bits_do_not_depend_on_threads_or_company(oracle, monkeypatch):
    monkeypatch.setattr(cpu_short, "_THREAD_WORK", 1)
    tiles = documents([33, 64, 1, 100, 12, 64, 7])
    tiles += [(100, 120, 281, 290, 0), (40, 50, 100, 110, 0)]
    x = oracle.inputs(*rows_of(tiles), (6, 3), torch.float32, head_dim=32)
    before, found = torch.get_num_threads(), {}
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            found[threads] = bits(compute(x, tiles, 0.3))
    finally:
        torch.set_num_threads(before)
    for threads in (2, 3, 8):
        assert all(map(torch.equal, found[1], found[threads])), threads
    apart = SoftmaxState.empty(x.q)
    engine = get_engine("cpu", device=CPU, dtype=torch.float32)
    for tile in tiles:
        engine.forward(x.q, x.k, x.v, Tiles([tile]), 0.3, apart)
    assert torch.equal(apart.out, found[1][0]) and torch.equal(apart.lse, found[1][1])


def test_heads_have_the_bits_they_have_alone(oracle):
    """What Ulysses relies on: a rank with some of the heads computes what all of them give."""
    tiles = documents([50, 20])
    x = oracle.inputs(70, 70, (4, 2), torch.float32, head_dim=32)
    whole = compute(x, tiles, 0.3)
    half = SimpleNamespace(q=x.q[:, 2:], k=x.k[:, 1:], v=x.v[:, 1:], dout=x.dout[:, 2:])
    found = compute(half, tiles, 0.3)
    for name, heads in (("out", 2), ("lse", 2), ("dq", 2), ("dk", 1), ("dv", 1)):
        assert torch.equal(getattr(whole, name)[:, heads:], getattr(found, name)), name


def test_a_later_part_merges_into_the_state(oracle):
    """A ring's steps: the same query rows, other keys, in calls of their own."""
    x = oracle.inputs(40, 90, (4, 2), torch.float32)
    parts = [[(0, 40, 0, 50, 0)], [(0, 40, 50, 90, 1)]]
    visible = oracle.visible(parts[0] + parts[1], 40, 90)
    expected = oracle.attention(x.q, x.k, x.v, x.dout, visible, 0.3)
    engine = get_engine("cpu", device=CPU, dtype=torch.float32)
    state = SoftmaxState.empty(x.q)
    for part in parts:
        engine.forward(x.q, x.k, x.v, Tiles(part), 0.3, state)
    assert (state.out - expected.out).abs().max() < 1e-5
    assert (state.lse - expected.lse).abs().max() < 1e-5


@pytest.mark.parametrize("size", [1e-30, 30.0])
def test_scores_of_any_size(oracle, size):
    """Peaked rows (scores of thousands) and flat ones; differences that underflow are 0."""
    tiles = documents([70, 20])
    x = oracle.inputs(90, 90, (2, 1), torch.float32)
    x.q, x.k = x.q * size, x.k * size
    visible = oracle.visible(tiles, 90, 90)
    expected = oracle.attention(x.q, x.k, x.v, x.dout, visible, 1.0)
    found = compute(x, tiles, 1.0)
    for name, wanted in vars(expected).items():
        error = (getattr(found, name).double() - wanted).abs().max()
        assert error <= 2e-3 * wanted.abs().max() + 1e-37, name  # scores of 1e4, fp32


def test_what_is_not_finite_stays_in_its_document(oracle):
    tiles = documents([30, 40, 25])
    x = oracle.inputs(95, 95, (4, 2), torch.float32)
    clean = compute(x, tiles, 0.3)
    for name in ("q", "k", "v", "dout"):
        broken = SimpleNamespace(**vars(x))
        tensor = getattr(x, name).clone()
        tensor[45] = math.nan
        setattr(broken, name, tensor)
        found = compute(broken, tiles, 0.3)
        others = torch.cat([torch.arange(30), torch.arange(70, 95)])
        for key, value in vars(found).items():
            assert torch.equal(value[others], getattr(clean, key)[others]), (name, key)
        touched = "out" if name in ("q", "k", "v") else "dq"
        assert getattr(found, touched)[45].isnan().all(), name


def test_views_of_any_stride(oracle):
    tiles = documents([20, 33, 4])
    x = oracle.inputs(57, 57, (4, 2), torch.float32)
    expected = bits(compute(x, tiles, 0.3))
    wide = {y: torch.cat([getattr(x, y)] * 2, dim=2)[..., 16:] for y in vars(x)}
    assert wide["q"].stride() == (128, 32, 1)
    assert all(map(torch.equal, bits(compute(SimpleNamespace(**wide), tiles, 0.3)), expected))
    major = {y: getattr(x, y).transpose(0, 1).contiguous().transpose(0, 1) for y in vars(x)}
    assert all(map(torch.equal, bits(compute(SimpleNamespace(**major), tiles, 0.3)), expected))


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
def test_torchs_default_dtype_is_none_of_its_business(oracle, default):
    tiles = documents([70, 40])
    x = oracle.inputs(110, 110, (4, 2), torch.float32)
    wanted = bits(compute(x, tiles, 0.3))
    state = SoftmaxState.empty(x.q)
    grads = [torch.zeros(y.shape) for y in (x.q, x.k[0], x.v[0])]
    arguments = (x.q, x.k[0], x.v[0])
    try:
        torch.set_default_dtype(default)
        found = bits(compute(x, tiles, 0.3))
        anchor_forward_(state, *arguments, 0.3, 0, 110)
        anchor_backward_(x.dout, *arguments, state.out, state.lse, 0.3, 0, 110, *grads)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, found, wanted))
    dv0 = x.dout.unflatten(1, (2, 2)).sum((0, 2))
    assert torch.allclose(grads[2], dv0, rtol=0, atol=1e-4)


def test_threads_are_waited_for_when_one_fails():
    ended = []

    def run(first, last):
        if first == 0:
            raise MemoryError
        time.sleep(0.2)
        ended.append(first)

    with pytest.raises(MemoryError):
        cpu_library.side_by_side(run, [0, 1, 2, 3])
    assert sorted(ended) == [1, 2]


class TestCompiled:
    """Which compiler, where its results lie, and what happens without."""

    @pytest.fixture
    def anew(self, monkeypatch, tmp_path):
        """A cache of its own, and nothing loaded yet."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        cpu_library.library.cache_clear()
        yield tmp_path / "anchorcontext"
        cpu_library.library.cache_clear()

    def test_it_compiles_once(self, anew, monkeypatch):
        compiled.load("cpu_kernels")
        (library,) = anew.iterdir()
        commands = []
        run = compiled._run
        monkeypatch.setattr(compiled, "_run", lambda c: commands.append(c) or run(c))
        compiled.load("cpu_kernels")
        assert list(anew.iterdir()) == [library]
        assert ["-o" in command for command in commands] == [False]

    def test_no_compiler_is_an_answer(self, anew, monkeypatch):
        for command, words in (
            ("false", r"no C compiler that runs here: install one"),
            ("no-such-compiler", r"cannot be used \(.*No such file.*\): install one"),
            ('cc "', r"'cc \"' cannot be used \(No closing quotation\)"),
            ("", "cannot be used"),
        ):
            monkeypatch.setenv("CC", command)
            with pytest.raises(compiled.CompilerError, match=words):
                compiled.load("cpu_kernels")
        assert not anew.exists()

    def test_source_that_does_not_compile_names_the_fault(self, anew, monkeypatch):
        monkeypatch.setenv("CC", "cc -Dmemset=1+")
        with pytest.raises(compiled.CompilerError, match=r"cc fails on cpu_kernels\.c \(.*error"):
            compiled.load("cpu_kernels")
        assert not list(anew.iterdir())

    def test_a_cache_that_cannot_be_written_is_done_without(self, anew, monkeypatch):
        anew.write_text("a file where the folder would be")
        assert compiled.load("cpu_kernels").short_scratch_elements(64, 64) > 0

    def test_other_options_are_another_library(self, anew, monkeypatch):
        compiled.load("cpu_kernels")
        monkeypatch.setenv("CC", "cc -ffp-contract=off")
        compiled.load("cpu_kernels")
        assert len(list(anew.iterdir())) == 2

    @pytest.mark.skipif(platform.machine() != "x86_64", reason="its options are those of x86")
    @pytest.mark.parametrize("options", ["-mno-avx512f", "-mno-avx512f -mno-avx -mno-fma"])
    def test_older_processors(self, anew, monkeypatch, oracle, options):
        tiles = documents([70, 9, 33])
        x = oracle.inputs(112, 112, (4, 2), torch.float32, head_dim=40)
        visible = oracle.visible(tiles, 112, 112)
        expected = oracle.attention(x.q, x.k, x.v, x.dout, visible, 0.3)
        monkeypatch.setenv("CC", f"cc {options}")
        assert_close(compute(x, tiles, 0.3), expected, torch.float32)
        assert len(list(anew.iterdir())) == 1

    def test_ranks_that_compile_at_the_same_time(self, anew):
        with ThreadPoolExecutor(2) as ranks:
            found = list(ranks.map(compiled.load, ["cpu_kernels"] * 2))
        assert all(library.short_scratch_elements(64, 64) > 0 for library in found)
        assert len(list(anew.iterdir())) == 1


def test_threads_get_equal_shares_and_never_part_a_cluster():
    tiles = documents([100, 1, 1, 100, 50, 300])
    tiles += [(450, 460, 560, 570, 0)]  # queries of the last document
    short = cpu_short.ShortTiles(np.array(tiles))
    units = short.units(2)
    assert sorted(map(tuple, units.array.tolist())) == [(t, h) for t in range(7) for h in range(2)]
    assert sorted(np.diff(units.bounds).tolist()) == [1] * 10 + [2, 2]
    assert units.work[-1] == 2 * sum(n * n for n in (100, 1, 1, 100, 50, 300, 10))
    assert cpu_short.equal_shares(units, 1) == [0, 14]
    assert set(cpu_short.equal_shares(units, 3)) <= set(units.bounds.tolist())

    def shares(work, threads):
        edges = np.arange(len(work) + 1)
        return cpu_short.equal_shares(cpu_short.Units(edges, edges, np.cumsum(work)), threads)

    assert shares([5] * 8, 4) == [0, 2, 4, 6, 8]
    assert shares([3, 3, 3, 30, 3], 2) == [0, 3, 5]
    assert shares([1, 99, 1], 4) == [0, 1, 2, 3]  # one group is nearly all
    assert shares([100, 1], 8) == [0, 1, 2]
