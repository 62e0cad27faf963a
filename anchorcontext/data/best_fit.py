"""Best-fit packing: whole documents, each in the fullest window that has room for it.

Ding et al., "Fewer Truncations Improve Language Modeling" (arXiv 2404.10830): documents longer than
a window are cut at its length; then best-fit decreasing over all pieces. On lengths like those of
web text more than 99.9 % of the windows is filled; documents of half a window and more leave room,
of which cutting a few of them makes use (``max_truncation``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .segments import Documents, Dropped, Segments

_BITS = 10
_WORD = 1 << _BITS


def best_fit(
    documents: Documents, capacity: int, max_truncation: float = 0.0
) -> tuple[Segments, dict[str, Dropped]]:
    """Windows of documents that are cut only where they must be; drops nothing.

    Windows come in the stream order of their longest segment, so that the first ones are no
    different from the last; a window's segments come in stream order.

    Args:
        documents: in stream order.
        capacity: tokens of a window.
        max_truncation: cuts allowed beyond those at a window's length, as a share of the number of
            documents. They are made, as few as possible, where they save a window.
    """
    pieces = _Pieces.of(documents, capacity)
    windows, num_windows = _best_fit_decreasing(pieces.sizes, capacity)
    budget = int(max_truncation * len(documents.lengths))
    if budget:
        pieces, windows = _cut_to_fill(pieces, windows, num_windows, capacity, budget, documents)
    return _in_order(pieces, windows), {}


@dataclass(frozen=True)
class _Pieces:
    """Runs of document tokens, and the ``sizes`` they take in a window; all int64 (n,)."""

    documents: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    sizes: np.ndarray

    @classmethod
    def of(cls, documents: Documents, capacity: int) -> _Pieces:
        """Every document whole, or cut at a window's length."""
        head = np.minimum(documents.lengths, capacity - documents.first)
        step = capacity - documents.again
        more = -((head - documents.lengths) // step)  # pieces behind the first, rounded up
        parent = np.repeat(np.arange(len(more)), more + 1)
        number = np.arange(len(parent)) - np.repeat(np.cumsum(more + 1) - (more + 1), more + 1)
        starts = np.where(number == 0, 0, head[parent] + (number - 1) * step[parent])
        room = np.where(number == 0, head[parent], step[parent])
        lengths = np.minimum(room, documents.lengths[parent] - starts)
        front = np.where(number == 0, documents.first[parent], documents.again[parent])
        return cls(parent, starts, lengths, lengths + front)


class _Rooms:
    """Windows by the room that is left in them.

    The rooms that occur are bits in words of 1,024, and the words that are not zero are bits in one
    more, so that the least room of a size or more is found in a few operations.
    """

    def __init__(self, capacity: int) -> None:
        self._windows: dict[int, list[int]] = {}
        self._words = [0] * (capacity // _WORD + 1)
        self._summary = 0

    def add(self, window: int, room: int) -> None:
        if room in self._windows:
            self._windows[room].append(window)
        elif room:
            self._windows[room] = [window]
            self._words[room >> _BITS] |= 1 << (room & (_WORD - 1))
            self._summary |= 1 << (room >> _BITS)

    def pop_tightest(self, size: int) -> tuple[int, int] | None:
        """Take out a window with the least room that is enough for ``size``, and that room."""
        word = size >> _BITS
        bits = self._words[word] >> (size & (_WORD - 1))
        if bits:
            return self._pop(size + _lowest(bits))
        above = self._summary >> (word + 1)
        if not above:
            return None
        word += 1 + _lowest(above)
        return self._pop((word << _BITS) + _lowest(self._words[word]))

    def pop_widest(self) -> tuple[int, int] | None:
        """Take out a window with the most room, and that room."""
        if not self._summary:
            return None
        word = self._summary.bit_length() - 1
        return self._pop((word << _BITS) + self._words[word].bit_length() - 1)

    def put(self, size: int) -> int | None:
        """Put something of ``size`` where it fits best: that window, None where there is none."""
        found = self.pop_tightest(size)
        if found is None:
            return None
        self.add(found[0], found[1] - size)
        return found[0]

    def _pop(self, room: int) -> tuple[int, int]:
        windows = self._windows[room]
        window = windows.pop()
        if not windows:
            del self._windows[room]
            word = room >> _BITS
            self._words[word] ^= 1 << (room & (_WORD - 1))
            if not self._words[word]:
                self._summary ^= 1 << word
        return window, room


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _best_fit_decreasing(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """The window of each piece, int64 (n,), and the number of windows."""
    order = np.argsort(-sizes, kind="stable")
    values, counts = np.unique(sizes, return_counts=True)
    rooms = _Rooms(capacity)
    windows: list[int] = []
    numbers: list[int] = []
    num_windows = 0
    for size, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        # The tightest window stays the tightest until the next piece of this size does not fit.
        while count:
            found = rooms.pop_tightest(size)
            window, room = (num_windows, capacity) if found is None else found
            num_windows += found is None
            number = min(count, room // size)
            rooms.add(window, room - number * size)
            windows.append(window)
            numbers.append(number)
            count -= number
    result = np.empty(len(sizes), dtype=np.int64)
    result[order] = np.repeat(np.array(windows, dtype=np.int64), numbers)
    return result, num_windows


_Parts = dict[int, list[tuple[int, int]]]
"""Piece -> (its tokens, window) for each part that it is moved in."""


def _cut_to_fill(
    pieces: _Pieces,
    windows: np.ndarray,
    num_windows: int,
    capacity: int,
    budget: int,
    documents: Documents,
) -> tuple[_Pieces, np.ndarray]:
    """Empty the emptiest windows, one after the other, into the room that the others have left.

    Ends with the first window that cannot be emptied with ``budget`` cuts in all.
    """
    filled = np.bincount(windows, pieces.sizes, num_windows).astype(np.int64)
    emptiest = np.argsort(filled, kind="stable")
    most = num_windows - -(-int(filled.sum()) // capacity)  # windows that can be saved
    rooms = _Rooms(capacity)
    for window in emptiest[most:].tolist():
        rooms.add(window, capacity - int(filled[window]))
    by_window = np.lexsort((-pieces.sizes, windows))
    bounds = np.searchsorted(windows[by_window], np.arange(num_windows + 1))
    moved: _Parts = {}
    for window in emptiest[:most].tolist():
        mine = by_window[bounds[window] : bounds[window + 1]]
        parts = _empty(pieces, mine, rooms, budget, documents)
        if parts is None:
            break
        budget -= sum(len(part) - 1 for part in parts.values())
        moved |= parts
    return _apply(moved, pieces, windows, documents)


def _empty(
    pieces: _Pieces, mine: np.ndarray, rooms: _Rooms, budget: int, documents: Documents
) -> _Parts | None:
    """Where the pieces ``mine`` of one window can go; None if some of them can go nowhere.

    As long as a piece fits nowhere, its head fills the window with the most room.
    """
    moved: _Parts = {}
    for piece in mine.tolist():
        length = int(pieces.lengths[piece])
        front = int(pieces.sizes[piece]) - length
        parts: list[tuple[int, int]] = []
        while (window := rooms.put(front + length)) is None:
            widest = rooms.pop_widest()
            if widest is None or widest[1] <= front or budget == 0:
                return None
            parts.append((widest[1] - front, widest[0]))
            length -= widest[1] - front
            front = int(documents.again[pieces.documents[piece]])
            budget -= 1
        moved[piece] = [*parts, (length, window)]
    return moved


def _apply(
    moved: _Parts, pieces: _Pieces, windows: np.ndarray, documents: Documents
) -> tuple[_Pieces, np.ndarray]:
    if not moved:
        return pieces, windows
    counts = np.array([len(parts) for parts in moved.values()])
    piece = np.repeat(np.array(list(moved)), counts)
    lengths, places = np.array([part for parts in moved.values() for part in parts]).T
    number = np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts)
    before = np.cumsum(lengths) - lengths
    starts = pieces.starts[piece] + before - np.repeat(before[number == 0], counts)
    parents = pieces.documents[piece]
    old_front = pieces.sizes[piece] - pieces.lengths[piece]
    front = np.where(number == 0, old_front, documents.again[parents])
    stay = np.ones(len(windows), dtype=bool)
    stay[piece] = False
    result = _Pieces(
        np.r_[pieces.documents[stay], parents],
        np.r_[pieces.starts[stay], starts],
        np.r_[pieces.lengths[stay], lengths],
        np.r_[pieces.sizes[stay], lengths + front],
    )
    return result, np.r_[windows[stay], places]


def _in_order(pieces: _Pieces, windows: np.ndarray) -> Segments:
    """Windows in the order of their longest piece's document, pieces in that of their documents."""
    longest = np.lexsort((pieces.starts, pieces.documents, -pieces.sizes, windows))
    first = np.r_[True, np.diff(windows[longest]) > 0][: len(windows)]
    opener = longest[first]
    names = windows[opener]  # emptied windows have no piece
    rank = np.empty(int(windows.max(initial=-1)) + 1, dtype=np.int64)
    rank[names[np.lexsort((pieces.starts[opener], pieces.documents[opener]))]] = np.arange(
        len(names)
    )
    place = rank[windows]
    order = np.lexsort((pieces.starts, pieces.documents, place))
    return Segments(
        pieces.documents[order],
        pieces.starts[order],
        pieces.lengths[order],
        np.searchsorted(place[order], np.arange(len(names) + 1)).astype(np.int64),
    )
