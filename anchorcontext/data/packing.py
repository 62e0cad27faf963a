"""Packing: which tokens of which documents make which window. Lengths only, no tokens.

A packer (``packers.py``) cuts documents into *segments* (a run of one document's tokens) and puts
each segment into one window; whatever it leaves out it names. :func:`pack` does what is common to
all packers: the minimum length, room for the anchor and for what stands in front of documents, the
limits on windows, and the check that no token is lost or doubled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..errors import UserError
from ..words import counted
from .packers import PACKERS
from .segments import Documents, Dropped, Segments, distinct

TOO_SHORT = "min_document_tokens"
TOO_EMPTY = "packing.min_fill"
TOO_MANY = "max_windows"


@dataclass(frozen=True)
class Packing:
    """Windows as segments, and by reason what is in none of them."""

    segments: Segments
    window_tokens: int
    anchor: bool
    num_front_tokens: int = 0
    """Tokens in front of segments that are not the documents' own."""
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
        real = self.num_kept + self.num_front_tokens + self.anchor * self.num_windows
        return real / room if room else 0.0

    @property
    def num_cut(self) -> int:
        """Documents that lie in more than one window."""
        in_windows = distinct(self.segments.documents * self.num_windows + self.segments.windows)
        again = np.diff(in_windows // max(self.num_windows, 1)) == 0
        return int((np.diff(again.astype(np.int8), prepend=0) == 1).sum())


def pack(
    lengths: np.ndarray,
    window_tokens: int,
    *,
    anchor: bool,
    method: str = "concat",
    max_truncation: float = 0.0,
    min_fill: float = 0.0,
    min_document_tokens: int = 1,
    max_windows: int | None = None,
    first: np.ndarray | None = None,
    again: np.ndarray | None = None,
) -> Packing:
    """Pack documents of ``lengths`` tokens (D,) into windows of at most ``window_tokens`` tokens.

    Args:
        anchor: one token of every window is left free for it.
        method: the packer, a key of ``PACKERS``.
        max_truncation: as of :func:`~anchorcontext.data.best_fit.best_fit`.
        min_fill: windows of which a smaller share is real tokens are dropped, and named.
        min_document_tokens: shorter documents are dropped, and named.
        max_windows: the segments of later windows are dropped, and named.
        first, again: (D,) tokens that stand in front of a document's first segment and of its
            continuation in another window; none by default.

    Raises:
        UserError: a window has no room for a document token.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    none = np.zeros_like(lengths)
    documents = Documents(
        lengths, none if first is None else first, none if again is None else again
    )
    _check_room(documents, window_tokens, anchor)
    long_enough = lengths >= max(min_document_tokens, 1)
    kept, short = np.flatnonzero(long_enough), np.flatnonzero(~long_enough & (lengths > 0))
    packed, left_out = PACKERS[method](documents[kept], window_tokens - anchor, max_truncation)
    segments = Segments(kept[packed.documents], packed.starts, packed.lengths, packed.offsets)
    dropped = {
        reason: Dropped(kept[part.documents], part.tokens) for reason, part in left_out.items()
    }
    if len(short):
        dropped[TOO_SHORT] = Dropped(short, lengths[short])
    filled = np.bincount(segments.windows, segments.lengths + documents.front(segments))
    segments = _limit(segments, filled + anchor >= min_fill * window_tokens, TOO_EMPTY, dropped)
    if max_windows is not None:
        num_windows = len(segments.offsets) - 1
        segments = _limit(segments, np.arange(num_windows) < max_windows, TOO_MANY, dropped)
    front_tokens = int(documents.front(segments).sum())
    packing = Packing(segments, window_tokens, anchor, front_tokens, dropped)
    lost = lengths.sum() - packing.num_kept - sum(part.num_tokens for part in dropped.values())
    assert lost == 0, f"packing {method!r} lost {lost} tokens"
    return packing


def _check_room(documents: Documents, window_tokens: int, anchor: bool) -> None:
    front = int(np.maximum(documents.first, documents.again).max(initial=0))
    if window_tokens - anchor - front < 1:
        in_front = f"{counted(front, 'token')} in front of a document"
        parts = ["the anchor"] * anchor + [in_front] * (front > 0)
        raise UserError(
            f"data.window_tokens = {window_tokens}: a window holds at least "
            f"{' and '.join([*parts, 'one token'])}"
        )


def _limit(
    segments: Segments, kept: np.ndarray, reason: str, dropped: dict[str, Dropped]
) -> Segments:
    """The windows where ``kept`` is true; all others are dropped for ``reason``."""
    if kept.all():
        return segments
    segments, others = segments.keep_windows(kept)
    dropped[reason] = Dropped(others.documents, others.lengths)
    return segments
