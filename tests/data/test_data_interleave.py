"""Interleaving moves every token and loses none; any order of the pieces can occur."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anchorcontext.data.interleave import interleave
from anchorcontext.data.packing import PACKERS, pack
from anchorcontext.data.segments import Segments


def segments_of(*windows):
    """Windows of whole documents of these lengths."""
    lengths = np.array([length for window in windows for length in window], dtype=np.int64)
    offsets = np.cumsum([0, *map(len, windows)])
    return Segments(np.arange(len(lengths)), np.zeros_like(lengths), lengths, offsets)


def tokens_of(segments, window):
    """(document, index) of every token of a window, in order."""
    mine = slice(segments.offsets[window], segments.offsets[window + 1])
    return [
        (document, token)
        for document, start, length in zip(
            segments.documents[mine].tolist(),
            segments.starts[mine].tolist(),
            segments.lengths[mine].tolist(),
            strict=True,
        )
        for token in range(start, start + length)
    ]


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), max_size=25),
    window_tokens=st.integers(2, 80),
    method=st.sampled_from(sorted(PACKERS)),
    pieces=st.sampled_from([(2, 3), (1, 2), (3, 3), (2, 5)]),
    tokens=st.sampled_from([(1, 60), (5, 20)]),
    seed=st.integers(0, 9),
)
def test_a_window_keeps_its_tokens_and_documents_their_order(
    lengths, window_tokens, method, pieces, tokens, seed
):
    lengths = np.array(lengths, dtype=np.int64)
    packed = pack(lengths, window_tokens, anchor=False, method=method).segments
    mixed = interleave(packed, pieces=pieces, tokens=tokens, seed=seed)
    assert len(mixed.offsets) == len(packed.offsets)
    for window in range(len(packed.offsets) - 1):
        before, after = tokens_of(packed, window), tokens_of(mixed, window)
        assert sorted(after) == sorted(before)
        for document in {document for document, _ in after}:
            own = [token for name, token in after if name == document]
            assert own == sorted(own)
    # A run is whole: neighbours that follow one another are one.
    follows = mixed.starts[1:] == mixed.starts[:-1] + mixed.lengths[:-1]
    follows &= mixed.documents[1:] == mixed.documents[:-1]
    assert not (follows & (mixed.windows[1:] == mixed.windows[:-1])).any()


def test_every_interleaving_of_two_documents_in_two_pieces_is_equally_likely():
    """C(4, 2) = 6 orders of a1 a2 b1 b2, each with 1/6: tells them from any biased shuffle."""
    windows = 6000
    packed = segments_of(*[(100, 100)] * windows)
    mixed = interleave(packed, pieces=(2, 2), seed=1)
    orders = Counter()
    for window in range(windows):
        names = [document % 2 for document, _ in tokens_of(mixed, window)]
        # Where two pieces of one document meet, they are one run: count runs by their cut.
        runs = "".join("ab"[name] for i, name in enumerate(names) if i == 0 or names[i - 1] != name)
        orders[runs] += 1
    # aabb -> ab, abba -> aba, baab -> bab, bbaa -> ba, abab, baba.
    assert set(orders) == {"ab", "ba", "aba", "bab", "abab", "baba"}
    expected, deviation = windows / 6, (windows * 1 / 6 * 5 / 6) ** 0.5
    assert all(abs(count - expected) < 4 * deviation for count in orders.values())


def test_all_orders_of_three_documents_occur():
    """Three documents of two pieces: 6! / 2!^3 = 90 orders."""
    packed = segments_of(*[(10, 10, 10)] * 4000)
    mixed = interleave(packed, pieces=(2, 2), cut=(0.5, 0.5), tokens=(2, 10), seed=3)
    orders = {
        tuple(document % 3 for document, token in tokens_of(mixed, w) if token in (0, 5))
        for w in range(4000)
    }
    assert len(orders) == 90


def test_cuts_lie_between_the_bounds_and_reach_them():
    packed = segments_of(*[(100,) * 8] * 400)
    mixed = interleave(packed, pieces=(2, 3), cut=(0.2, 0.8), seed=0)
    cuts = mixed.starts[mixed.starts > 0]
    assert cuts.min() == 20 and cuts.max() == 80
    assert abs(cuts.mean() - 50) < 1
    number = np.bincount(mixed.documents)
    assert set(number.tolist()) == {1, 2, 3}  # 1: all pieces came to lie behind one another


def test_only_documents_of_the_given_lengths_are_cut_but_all_may_move():
    packed = segments_of(*[(63, 64, 2048, 2049)] * 50)
    mixed = interleave(packed, seed=0)
    cut = {int(packed.lengths[d]) for d in np.unique(mixed.documents[mixed.starts > 0])}
    assert cut == {64, 2048}
    first = {int(packed.lengths[d]) for d in mixed.documents[mixed.offsets[:-1]]}
    assert first == {63, 64, 2048, 2049}


def test_a_window_is_mixed_by_its_seed_and_number_alone():
    packed = segments_of(*[(100, 200, 300)] * 6)
    mixed = interleave(packed, seed=5)
    fewer = interleave(packed.keep_windows(np.arange(6) < 4)[0], seed=5)
    stop = fewer.offsets[-1]
    for name in ("documents", "starts", "lengths"):
        assert (getattr(mixed, name)[:stop] == getattr(fewer, name)).all()
    shapes = {tuple(document % 3 for document, _ in tokens_of(mixed, w)) for w in range(6)}
    assert len(shapes) == 6
    other = interleave(packed, seed=6)
    assert len(other.lengths) != len(mixed.lengths) or (other.lengths != mixed.lengths).any()


@pytest.mark.parametrize("window", [0, 1])
def test_a_continuation_counts_from_its_own_first_token(window):
    packed = pack(np.array([150]), 100, anchor=False).segments
    mixed = interleave(packed, tokens=(2, 100), seed=2)
    assert sorted(tokens_of(mixed, window)) == tokens_of(packed, window)
