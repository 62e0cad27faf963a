"""D by bands of RoPE's frequencies: where rounding far out comes from, and what is read from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from anchorcontext.precision import Workers
from anchorcontext.precision.rope.band_sheet import band_means, band_readings, band_table
from anchorcontext.precision.rope.bands import (
    Band,
    bands_of,
    energy_shares,
    one_sided,
    turned,
    wavelengths,
)
from anchorcontext.precision.rope.measure import BandSplit
from anchorcontext.precision.rope.parts import Parts, split, split_bands
from anchorcontext.precision.rope.stages import EXACT, Heads, parse_stack, rotate

TOKENS, DIM = 96, 32
HALF = DIM // 2
STOCK = parse_stack("sdpa:bf16")
INV_FREQ = 100_000.0 ** -(torch.arange(HALF, dtype=torch.float64) / HALF)
BANDS = bands_of(INV_FREQ)
NEAR, FAR = 0, 131_072


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers(1) as pool:
        yield pool


def make_heads(band: Band | None = None, *, one_dimension: bool = False) -> Heads:
    """Normal q and k on bf16's grid, in all dimensions or in those of one band, or only in the
    first of each of its pairs."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, TOKENS, DIM, generator=generator).bfloat16().double() for _ in range(3)
    )
    dims = list(band) if band else list(range(HALF))
    dims += [] if one_dimension else [i + HALF for i in dims]
    inside = torch.zeros(DIM, dtype=torch.float64)
    inside[dims] = 1.0
    return Heads(query * inside, key * inside, value, DIM**-0.5, INV_FREQ)


def by_bands(heads: Heads, workers: Workers, offset: int, stack: str = "sdpa:bf16") -> Parts:
    return split_bands(heads, parse_stack(stack), BANDS, offset=offset, shift=16, workers=workers)


def deviation(heads: Heads, workers: Workers, offset: int) -> float:
    """D, eq. 4, under the shift."""
    return float(by_bands(heads, workers, offset).total[1, 0])


def test_bands_are_equal_groups_the_fastest_first() -> None:
    assert BANDS == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert bands_of(INV_FREQ.flip(0))[0] == (15, 14, 13, 12)
    assert bands_of(INV_FREQ[:3]) == [(0,), (1,), (2,)]
    lengths = wavelengths(INV_FREQ, BANDS)
    np.testing.assert_allclose(lengths[0, 0], 2 * np.pi)
    assert (np.diff(lengths.flatten()) > 0).all()


def test_bands_in_fp64_deviate_nowhere(workers: Workers) -> None:
    parts = by_bands(make_heads(), workers, FAR, "all:fp64")
    assert (parts.total[0] == 0).all() and (parts.alone[0] == 0).all()
    assert (parts.alone[1] < 1e-9).all() and (parts.ordered == 0).all()


def test_all_bands_are_the_whole(workers: Workers) -> None:
    """Scores and later in fp32 add nothing to be seen, so D is that of the stack."""
    parts = by_bands(make_heads(), workers, NEAR)
    whole = split(make_heads(), STOCK, offset=NEAR, shift=16, workers=workers)
    np.testing.assert_allclose(parts.total[:, :2], whole.total[:, :2], rtol=1e-3)
    np.testing.assert_allclose(parts.ordered.sum(-1), parts.total, rtol=1e-6)
    assert (abs(parts.interaction[1, :2]) < 0.1 * parts.total[1, :2]).all()


def test_one_band_is_rounded_and_no_other() -> None:
    heads, positions = make_heads(), torch.arange(TOKENS) + FAR
    inside = [*BANDS[1], *(i + HALF for i in BANDS[1])]
    outside = [i for i in range(DIM) if i not in inside]
    some, all_of, none = (
        rotate(heads.query[0], positions, heads, stack)
        for stack in (STOCK.on(BANDS[1]), STOCK, EXACT)
    )
    assert torch.equal(some[:, inside], all_of[:, inside])
    assert torch.equal(some[:, outside], none[:, outside])
    assert not torch.equal(all_of[:, outside], none[:, outside])


def test_what_slow_frequencies_round_is_there_only_far_out(workers: Workers) -> None:
    """q and k along one dimension of slow pairs stay on bf16's grid near 0. Quick ones turn."""
    slow, fast = (make_heads(band, one_dimension=True) for band in (BANDS[-1], BANDS[0]))
    assert deviation(slow, workers, FAR) > 4 * deviation(slow, workers, NEAR)
    assert 0.7 < deviation(fast, workers, FAR) / deviation(fast, workers, NEAR) < 1.5
    parts = by_bands(slow, workers, FAR)
    assert (parts.alone[0, 0, :-1] == 0).all()
    np.testing.assert_allclose(parts.ordered[1, :, -1], parts.total[1])


def test_turned_pairs_are_the_same_attention_and_another_rounding(workers: Workers) -> None:
    slow = make_heads(BANDS[-1], one_dimension=True)
    positions = torch.arange(TOKENS)
    scores = [
        rotate(heads.query[0], positions, heads, EXACT)
        @ rotate(heads.key[0], positions, heads, EXACT).t()
        for heads in (slow, turned(slow))
    ]
    torch.testing.assert_close(scores[0], scores[1], atol=1e-12, rtol=0)
    assert deviation(turned(slow), workers, NEAR) > 2 * deviation(slow, workers, NEAR)
    # Those that lie nowhere in particular gain nothing.
    alike = make_heads(BANDS[-1])
    assert 0.7 < deviation(turned(alike), workers, NEAR) / deviation(alike, workers, NEAR) < 1.5


def test_energy_and_how_it_lies() -> None:
    heads = make_heads()
    loud = torch.ones(DIM, dtype=torch.float64)
    loud[[*BANDS[2], *(i + HALF for i in BANDS[2])]] = 3.0
    shares = energy_shares(replace(heads, query=heads.query * loud), BANDS, [0, 1])
    np.testing.assert_allclose(shares, [1 / 6, 1 / 6, 1 / 2, 1 / 6], atol=0.02)
    assert (one_sided(heads, BANDS, [0, 1]) < 0.6).all()
    along = one_sided(make_heads(BANDS[-1], one_dimension=True), BANDS, [0])
    assert along.tolist() == [0.5, 0.5, 0.5, 1.0]


def stored(near: Sequence[float], far: Sequence[float], by_turning: float) -> list[BandSplit]:
    """Parts of D of two bands, one quicker and one slower than 96 tokens."""

    def one(parts: Sequence[float], offset: int, is_turned: bool) -> BandSplit:
        ordered = np.broadcast_to(np.array(parts), (2, 3, 2)).copy()
        of = Parts(ordered.sum(-1), np.sqrt(ordered * sum(parts)), ordered, np.zeros(3))
        shares = np.array([0.4, 0.6]), np.array([0.5, 0.9])
        lengths = np.array([[6.28, 90.0], [1234.5, 438_000.0]])
        return BandSplit("normal", 0, 0, STOCK.name, offset, of, is_turned, *shares, lengths)

    turned_near = [x * by_turning for x in near]
    return [one(near, NEAR, False), one(turned_near, NEAR, True), one(far, FAR, False)]


@pytest.mark.parametrize(
    ("near", "far", "by_turning", "said"),
    [
        ([1, 1], [1, 3], 2.0, ["grows 2 times", "100% of the growth", "90% of their energy"]),
        ([1, 1], [1, 3], 1.2, ["100% of the growth", "not how q and k lie"]),
        ([1, 1], [3, 1], 1.0, ["0% of the growth", "not they", "6 to 90 tokens add most, 100%"]),
        ([3, 1], [3, 2], 1.0, ["stays within", "60% of the scores' energy", "40% of D far out"]),
    ],
)
def test_readings_follow_the_numbers(
    near: list[float], far: list[float], by_turning: float, said: list[str]
) -> None:
    found = band_means(stored(near, far, by_turning))
    (reading,) = band_readings(found, TOKENS)
    assert all(words in reading for words in said), reading
    (table,) = band_table(found, 16)
    assert [row[1] for row in table.rows] == ["6 to 90", "1,230 to 438,000", "all"]
    assert all(len(row) == len(table.headers) for row in table.rows)


def test_without_both_offsets_nothing_is_said() -> None:
    assert band_table(band_means(stored([1, 1], [1, 3], 2.0)[:2]), 16) == []
