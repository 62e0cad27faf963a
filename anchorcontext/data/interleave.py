"""Interleaving: documents cut into pieces that lie scattered over their window, in order.

Section 4.3 of the AnchorAttention paper (arXiv 2411.13476): a document of 64 to 2,048 tokens is cut
into two or three pieces, and a later piece sees the earlier ones of its document.
"""

from __future__ import annotations

import numpy as np

from .draws import draw, uniform
from .segments import Segments, distinct


def interleave(
    segments: Segments,
    *,
    pieces: tuple[int, int] = (2, 3),
    cut: tuple[float, float] = (0.2, 0.8),
    tokens: tuple[int, int] = (64, 2048),
    seed: int = 0,
) -> Segments:
    """The same windows with their segments cut into pieces and shuffled; a permutation of tokens.

    Every order of a window's pieces that keeps those of one document in order is equally likely.
    Pieces that come to lie behind one another again are one segment again. What happens in window
    w is a function of (seed, w) and of its segments alone.

    Args:
        segments: of packed windows, a document at most once in a window.
        pieces: the least and the most pieces of a document; each number is equally likely.
        cut: where cuts may lie, as shares of the document's length; uniform between them.
        tokens: the shortest and the longest segment that is cut; others stay whole but move, too.
        seed: of counts, cuts and orders.
    """
    num_windows = len(segments.offsets) - 1
    window = np.repeat(np.arange(num_windows), np.diff(segments.offsets))
    place = np.arange(len(window)) - segments.offsets[window]
    parent, start, stop = _cut(segments, window, place, pieces, cut, tokens, seed)
    window = window[parent]
    parent = parent[_shuffle(window, seed)]  # which document stands at each place of a window ...
    # ... and pieces are ordered by document, as the stable sort of those places is.
    place_of_piece = np.argsort(parent, kind="stable")
    start[place_of_piece], stop[place_of_piece] = start.copy(), stop.copy()
    return _join(segments, parent, start, stop)


def _cut(
    segments: Segments,
    window: np.ndarray,
    place: np.ndarray,
    pieces: tuple[int, int],
    cut: tuple[float, float],
    tokens: tuple[int, int],
    seed: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pieces as (segment, first token, end within the segment), in the order of the segments."""
    lengths = segments.lengths
    least, most = pieces
    cuttable = (lengths >= tokens[0]) & (lengths <= tokens[1])
    count = least + (draw(seed, "pieces", window, place) % np.uint64(most - least + 1)).astype(int)
    num_cuts = np.where(cuttable, count - 1, 0)
    segment = np.repeat(np.arange(len(lengths)), num_cuts)
    number = np.arange(len(segment)) - np.repeat(np.cumsum(num_cuts) - num_cuts, num_cuts)
    share = uniform(seed, "cut", window[segment], place[segment], number)
    low, high = np.ceil(cut[0] * lengths[segment]), np.floor(cut[1] * lengths[segment])
    at = (low + np.floor(share * (high - low + 1))).astype(np.int64)
    at = np.clip(at, 1, lengths[segment] - 1)
    # Segment and offset as one number: each segment is an interval of one line, cut at points.
    ends = np.cumsum(lengths)
    begins = ends - lengths
    edges = distinct(begins, ends[-1:], begins[segment] + at)
    parent = np.searchsorted(ends, edges[:-1], side="right")
    return parent, edges[:-1] - begins[parent], edges[1:] - begins[parent]


def _shuffle(window: np.ndarray, seed: int) -> np.ndarray:
    """A random order of the pieces of each window; ``window`` is sorted."""
    _, first = np.unique(window, return_index=True)
    number = np.arange(len(window)) - np.repeat(first, np.diff(np.r_[first, len(window)]))
    return np.lexsort((draw(seed, "order", window, number), window))


def _join(segments: Segments, parent: np.ndarray, start: np.ndarray, stop: np.ndarray) -> Segments:
    """Pieces in window order as segments, neighbours that follow one another joined."""
    follows = (parent[1:] == parent[:-1]) & (start[1:] == stop[:-1])
    first = np.flatnonzero(np.r_[True, ~follows][: len(parent)])
    last = np.r_[first[1:], len(parent)][: len(first)] - 1
    window_of_segment = np.repeat(np.arange(len(segments.offsets) - 1), np.diff(segments.offsets))
    window = window_of_segment[parent[first]]
    return Segments(
        documents=segments.documents[parent[first]],
        starts=segments.starts[parent[first]] + start[first],
        lengths=stop[last] - start[first],
        offsets=np.searchsorted(window, np.arange(len(segments.offsets))).astype(np.int64),
    )
