"""Packers: documents, as lengths, into windows of ``capacity`` tokens. One function each.

A packer cuts documents into segments and gives every segment to a window. It leaves nothing out
without naming it, and puts a document into a window at most once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .best_fit import best_fit
from .segments import Documents, Dropped, Segments, distinct

TOO_LONG = "longer_than_window"

Packer = Callable[[Documents, int, float], tuple[Segments, dict[str, Dropped]]]
"""Called with the documents, the tokens of a window, and ``max_truncation``: how often documents
may be cut that need not be, as a share of their number. A packer that always or never cuts ignores
it."""


def concat(
    documents: Documents, capacity: int, max_truncation: float = 1.0
) -> tuple[Segments, dict[str, Dropped]]:
    """Documents in order, as one stream cut wherever a window is full; drops nothing.

    A document that is cut continues in the next window, where it is a document of its own. Only
    the last window is shorter, and one in which the tokens in front of the next document would
    leave no room for a token of it.
    """
    ends = np.cumsum(documents.lengths)
    total = int(ends[-1]) if len(ends) else 0
    cuts = _cuts(documents, capacity) if total else np.zeros(0, dtype=np.int64)
    edges = distinct(np.zeros(1, dtype=np.int64), ends, cuts)
    begins = edges[:-1]
    parents = np.searchsorted(ends, begins, side="right")
    segments = Segments(
        documents=parents,
        starts=begins - (ends - documents.lengths)[parents],
        lengths=np.diff(edges),
        offsets=np.r_[np.searchsorted(begins, cuts), len(begins)].astype(np.int64),
    )
    return segments, {}


def _cuts(documents: Documents, capacity: int) -> np.ndarray:
    """int64 (W,): the first token of each window, as its number in the stream of all documents."""
    total = int(documents.lengths.sum())
    if not (documents.first.any() or documents.again.any()):
        return np.arange(0, total, capacity, dtype=np.int64)
    begins = np.cumsum(documents.lengths) - documents.lengths
    filled = np.cumsum(documents.sizes)
    cuts = []
    document, done = 0, 0  # the next window begins with token ``done`` of ``document``
    while document < len(documents.lengths):
        cuts.append(int(begins[document]) + done)
        room = capacity
        if done:
            take = min(
                room - int(documents.again[document]), int(documents.lengths[document]) - done
            )
            room -= int(documents.again[document]) + take
            done += take
            if done < documents.lengths[document]:
                continue
            document += 1
        before = int(filled[document - 1]) if document else 0
        document = int(np.searchsorted(filled, before + room, side="right"))
        room -= (int(filled[document - 1]) if document else 0) - before
        done = 0
        if document < len(documents.lengths):
            done = max(0, room - int(documents.first[document]))
    return np.array(cuts, dtype=np.int64)


def whole_documents(
    documents: Documents, capacity: int, max_truncation: float = 0.0
) -> tuple[Segments, dict[str, Dropped]]:
    """As :func:`~anchorcontext.data.best_fit.best_fit`, but no document is ever cut.

    Those that are longer than a window are dropped, and named.
    """
    fits = documents.sizes <= capacity
    short, long = np.flatnonzero(fits), np.flatnonzero(~fits)
    segments, _ = best_fit(documents[short], capacity)
    segments = Segments(
        short[segments.documents], segments.starts, segments.lengths, segments.offsets
    )
    return segments, {TOO_LONG: Dropped(long, documents.lengths[long])} if len(long) else {}


PACKERS: dict[str, Packer] = {
    "concat": concat,
    "best_fit": best_fit,
    "whole_documents": whole_documents,
}
