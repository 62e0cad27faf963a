"""Packing: which tokens of which documents make which window. Lengths only, no tokens.

A packer cuts documents into *segments* (a run of one document's tokens) and puts each segment into
one window; whatever it leaves out it names. :func:`pack` does what is common to all packers: the
minimum length, room for the anchor, the limit of windows, and the check that no token is lost or
doubled. A new packer is one function in ``PACKERS``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..errors import UserError

TOO_SHORT = "min_document_tokens"
TOO_MANY = "max_windows"


@dataclass(frozen=True)
class Segments:
    """S runs of document tokens in window order; all arrays int64.

    Segment s is the tokens ``starts[s] : starts[s] + lengths[s]`` of document ``documents[s]``;
    window w holds the segments ``offsets[w] : offsets[w + 1]`` (W + 1 offsets).
    """

    documents: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True)
class Dropped:
    """Tokens left out for one reason: ``tokens[i]`` of document ``documents[i]``, both int64."""

    documents: np.ndarray
    tokens: np.ndarray

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.sum())

    @property
    def num_documents(self) -> int:
        """Documents that lost tokens."""
        return len(np.unique(self.documents))


@dataclass(frozen=True)
class Packing:
    """Windows as segments, and by reason what is in none of them."""

    segments: Segments
    window_tokens: int
    anchor: bool
    dropped: dict[str, Dropped] = field(default_factory=dict)

    @property
    def num_windows(self) -> int:
        return len(self.segments.offsets) - 1

    @property
    def num_kept(self) -> int:
        """Document tokens that are in a window (anchors are not document tokens)."""
        return int(self.segments.lengths.sum())

    @property
    def utilisation(self) -> float:
        """The share of ``windows x window_tokens`` that is real tokens; the rest is padding."""
        room = self.num_windows * self.window_tokens
        return (self.num_kept + self.anchor * self.num_windows) / room if room else 0.0


def concat(lengths: np.ndarray, capacity: int) -> tuple[Segments, dict[str, Dropped]]:
    """Documents in order, as one stream cut at every ``capacity`` tokens; drops nothing.

    A document that is cut continues in the next window, where it is a document of its own. Only
    the last window may be shorter. ``lengths`` (D,) int64, all positive.
    """
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.arange(0, total, capacity, dtype=np.int64)
    edges = np.union1d(np.r_[np.int64(0), ends], cuts) if total else np.zeros(1, dtype=np.int64)
    begins = edges[:-1]
    documents = np.searchsorted(ends, begins, side="right")
    segments = Segments(
        documents=documents,
        starts=begins - (ends - lengths)[documents],
        lengths=np.diff(edges),
        offsets=np.r_[np.searchsorted(begins, cuts), len(begins)].astype(np.int64),
    )
    return segments, {}


Packer = Callable[[np.ndarray, int], tuple[Segments, dict[str, Dropped]]]
PACKERS: dict[str, Packer] = {"concat": concat}


def pack(
    lengths: np.ndarray,
    window_tokens: int,
    *,
    anchor: bool,
    method: str = "concat",
    min_document_tokens: int = 1,
    max_windows: int | None = None,
) -> Packing:
    """Pack documents of ``lengths`` tokens (D,) into windows of at most ``window_tokens`` tokens.

    With ``anchor`` one token of every window is left free for it. Documents shorter than
    ``min_document_tokens`` and the segments of windows past ``max_windows`` are dropped, and named.

    Raises:
        UserError: a window has no room for a document token.
    """
    capacity = window_tokens - anchor
    if capacity < 1:
        needed = "the anchor and one token" if anchor else "one token"
        raise UserError(f"data.window_tokens = {window_tokens}: a window holds at least {needed}")
    lengths = np.asarray(lengths, dtype=np.int64)
    long_enough = lengths >= max(min_document_tokens, 1)
    kept, short = np.flatnonzero(long_enough), np.flatnonzero(~long_enough)
    segments, dropped = PACKERS[method](lengths[kept], capacity)
    dropped = {
        reason: Dropped(kept[part.documents], part.tokens) for reason, part in dropped.items()
    }
    if len(short):
        dropped[TOO_SHORT] = Dropped(short, lengths[short])
    documents, offsets = kept[segments.documents], segments.offsets
    if max_windows is not None and len(offsets) - 1 > max_windows:
        last = int(offsets[max_windows])
        dropped[TOO_MANY] = Dropped(documents[last:], segments.lengths[last:])
        offsets, documents = offsets[: max_windows + 1], documents[:last]
    stop = len(documents)
    segments = Segments(documents, segments.starts[:stop], segments.lengths[:stop], offsets)
    packing = Packing(segments, window_tokens, anchor, dropped)
    lost = lengths.sum() - packing.num_kept - sum(part.num_tokens for part in dropped.values())
    assert lost == 0, f"packing {method!r} lost {lost} tokens"
    return packing
