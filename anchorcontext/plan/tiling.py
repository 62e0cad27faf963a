"""From pieces to tiles and messages: what every exchange needs to write its steps."""

from __future__ import annotations

import numpy as np

from anchorcontext.kernels.interface import Tiles

from .pieces import Pieces
from .steps import Message, Rows


def make_tiles(
    pieces: Pieces,
    queries: np.ndarray,
    keys: np.ndarray,
    key_row: np.ndarray,
    exact: bool = False,
) -> Tiles:
    """The tiles of query pieces against key pieces whose rows start at ``key_row`` in a buffer.

    A piece sees itself causally and every earlier piece of its group in full. Key pieces of one
    query piece that touch in the buffer become one tile; where the last of them is the query piece
    itself, that tile is causal, bottom-right.

    Args:
        pieces: of the micro-batch.
        queries: numbers of this rank's pieces.
        keys: numbers of the pieces in the buffer that this rank may look at.
        key_row: first row of each of ``keys`` in the buffer.
        exact: see :class:`~anchorcontext.kernels.Tiles`; every tile must come out causal.
    """
    if not len(keys):  # most steps of a pruned ring
        return Tiles(np.zeros((0, 5), dtype=np.int64), exact)
    order = np.argsort(key_row, kind="stable")
    keys, key_row = keys[order], key_row[order]
    sees = (pieces.group[queries][:, None] == pieces.group[keys][None, :]) & (
        pieces.start[keys][None, :] <= pieces.start[queries][:, None]
    )
    q, k = np.nonzero(sees)
    tiles = np.stack(
        [
            pieces.row[queries][q],
            (pieces.row + pieces.size)[queries][q],
            key_row[k],
            key_row[k] + pieces.size[keys][k],
            (queries[q] == keys[k]).astype(np.int64),
        ],
        axis=1,
    )
    return Tiles(_join_keys(tiles), exact)


def tile_counts(pieces: Pieces, sp_size: int, exchange: str) -> np.ndarray:
    """Tiles of every rank over all steps, int64 (P,).

    A piece of queries is one tile with its own rank's keys, and one more for every other rank that
    holds earlier keys of its document (``"ring"``), or for all of them together (``"gather"``).
    Own pieces of a document that do not lie side by side on their rank are more tiles than that.
    """
    start, group, owner = pieces.start, pieces.group, pieces.owner
    first = np.full((sp_size, int(group.max()) + 1), np.iinfo(np.int64).max)
    np.minimum.at(first, (owner, group), start)
    others = (first[:, group] < start).sum(axis=0) - (first[owner, group] < start)
    tiles = 1 + (others if exchange == "ring" else (others > 0))
    return np.bincount(owner, weights=tiles, minlength=sp_size).astype(np.int64)


def owned(pieces: Pieces, rank: int) -> np.ndarray:
    """The pieces of a rank in the order of its rows: both ends of a message list them alike."""
    index = np.flatnonzero(pieces.owner == rank)
    return index[np.argsort(pieces.row[index], kind="stable")]


def message(peer: int, start: np.ndarray, size: np.ndarray) -> tuple[Message, ...]:
    """The rows ``start .. start + size - 1`` to or from ``peer``; nothing where there are none."""
    return (Message(peer, Rows.of(start, size)),) if len(start) else ()


def _join_keys(tiles: np.ndarray) -> np.ndarray:
    """Join tiles of the same queries whose keys touch; only the last of them may be causal."""
    if len(tiles) < 2:
        return tiles
    before, after = tiles[:-1], tiles[1:]
    joins = (before[:, 0] == after[:, 0]) & (before[:, 3] == after[:, 2]) & (before[:, 4] == 0)
    first, last = np.r_[True, ~joins], np.r_[~joins, True]
    joined = tiles[first].copy()
    joined[:, 3:] = tiles[last, 3:]
    return joined
