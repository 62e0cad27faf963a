"""Best-fit packing: few documents are cut, and cutting a few more saves windows."""

import numpy as np
import pytest

from anchorcontext.data.packing import pack


def windows_of(packing):
    s = packing.segments
    return [
        list(zip(s.documents[a:b].tolist(), s.lengths[a:b].tolist(), strict=True))
        for a, b in zip(s.offsets[:-1], s.offsets[1:], strict=True)
    ]


def best_fit_decreasing(sizes, capacity):
    """The algorithm as its paper states it, by search over all windows; rooms of all windows."""
    rooms = []
    for size in sorted(sizes, reverse=True):
        fitting = [room for room in rooms if room >= size]
        if fitting:
            rooms[rooms.index(min(fitting))] -= size
        else:
            rooms.append(capacity - size)
    return sorted(rooms)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("capacity", [50, 1500, 30_000])
def test_the_rooms_left_are_those_of_the_plain_algorithm(seed, capacity):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, capacity * rng.uniform(0.2, 1), 80)
    packing = pack(lengths, capacity, anchor=False, method="best_fit")
    fill = np.bincount(packing.segments.windows, packing.segments.lengths)
    assert packing.num_cut == 0
    assert sorted((capacity - fill).astype(int)) == best_fit_decreasing(lengths.tolist(), capacity)


def test_a_document_longer_than_a_window_is_cut_at_its_length_only():
    lengths = np.array([3, 25, 4])
    packing = pack(lengths, 11, anchor=True, method="best_fit")
    assert windows_of(packing) == [[(0, 3)], [(1, 10)], [(1, 10)], [(1, 5), (2, 4)]]
    whole = pack(lengths, 11, anchor=True, method="whole_documents")
    assert windows_of(whole) == [[(0, 3), (2, 4)]]
    assert whole.dropped["longer_than_window"].documents.tolist() == [1]
    assert whole.dropped["longer_than_window"].num_tokens == 25


def test_the_tokens_in_front_count_with_every_piece():
    front, again = np.array([1, 1]), np.array([3, 0])
    lengths = np.array([20, 4])
    packing = pack(lengths, 10, anchor=False, method="best_fit", first=front, again=again)
    assert windows_of(packing) == [[(0, 9)], [(0, 7)], [(0, 4)], [(1, 4)]]


def test_windows_come_in_the_order_of_their_longest_document():
    packing = pack(np.array([2, 5, 3, 9, 6]), 10, anchor=False, method="best_fit")
    assert windows_of(packing) == [[(0, 2), (1, 5)], [(3, 9)], [(2, 3), (4, 6)]]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.4, 1.0])
def test_cutting_some_documents_saves_windows(share):
    lengths = np.full(100, 60)
    packing = pack(lengths, 100, anchor=False, method="best_fit", max_truncation=share)
    assert packing.num_cut <= share * 100
    # Each cut fills the room of two windows with the document of a third, at the best.
    saved = {0.0: 0, 0.1: 10, 0.4: 40, 1.0: 40}[share]
    assert packing.num_windows == 100 - saved
    assert packing.num_kept == 6000


@pytest.mark.parametrize("seed", range(5))
def test_no_more_documents_are_cut_than_allowed(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(300, 1000, 400)
    whole = pack(lengths, 1000, anchor=False, method="best_fit")
    for share in (0.01, 0.05, 0.5):
        packing = pack(lengths, 1000, anchor=False, method="best_fit", max_truncation=share)
        assert packing.num_cut <= share * len(lengths)
        assert packing.num_windows < whole.num_windows
        assert packing.num_kept == lengths.sum()
    assert packing.num_windows <= lengths.sum() // 1000 + 2
