"""How the anchor of each window reaches the ranks whose queries see it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..window import Window
from .pieces import Pieces
from .steps import Anchors, Message, Rows, Transfer


def plan_anchors(pieces: Pieces, windows: Sequence[Window], sp_size: int, rank: int) -> Anchors:
    """The anchors' part of ``rank``'s plan.

    The owner sends the anchor's key and value (one row) straight to every rank that holds a query
    of another document of the window: a few KiB a layer. Backward returns one fp32 row each.
    """
    anchored = np.array([window.mode.anchor for window in windows], dtype=bool)
    number = np.cumsum(anchored) - 1
    first = np.flatnonzero(np.r_[True, pieces.window[1:] != pieces.window[:-1]])
    anchor_piece = first[anchored]
    anchor_owner, anchor_row = pieces.owner[anchor_piece], pieces.row[anchor_piece]
    sees = anchored[pieces.window] & (pieces.group != pieces.group[first][pieces.window])
    wants = np.zeros((sp_size, len(anchor_piece)), dtype=bool)
    wants[pieces.owner[sees], number[pieces.window[sees]]] = True

    sends, receives = [], []
    for peer in range(sp_size):
        if peer == rank:
            continue
        outgoing = np.flatnonzero(wants[peer] & (anchor_owner == rank))
        if len(outgoing):
            sends.append(Message(peer, Rows.of(anchor_row[outgoing], _ones(outgoing))))
        arriving = np.flatnonzero(wants[rank] & (anchor_owner == peer))
        if len(arriving):
            receives.append(Message(peer, Rows.of(arriving, _ones(arriving))))
    own = np.flatnonzero(anchor_owner == rank)
    mine = np.flatnonzero(sees & (pieces.owner == rank))
    mine = mine[np.argsort(pieces.row[mine], kind="stable")]
    return Anchors(
        num_anchors=len(anchor_piece),
        own=np.stack([own, anchor_row[own]], axis=1).astype(np.int64),
        queries=_query_runs(pieces, mine, number),
        broadcast=Transfer(sends=tuple(sends), receives=tuple(receives)),
    )


def _query_runs(pieces: Pieces, mine: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Local query rows by anchor, neighbours joined: int64 (m, 3)."""
    if not len(mine):
        return np.zeros((0, 3), dtype=np.int64)
    anchor, start = number[pieces.window[mine]], pieces.row[mine]
    stop = start + pieces.size[mine]
    touch = (anchor[1:] == anchor[:-1]) & (start[1:] == stop[:-1])
    first, last = np.r_[True, ~touch], np.r_[~touch, True]
    return np.stack([anchor[first], start[first], stop[last]], axis=1).astype(np.int64)


def _ones(like: np.ndarray) -> np.ndarray:
    return np.ones(len(like), dtype=np.int64)
