"""Pieces: the unit in which keys are needed and travel.

A piece is a longest stretch of tokens that lies in one document (one attention group) and in one
rank's run. Because a rank's runs and a document's tokens are cut at the same places, a rank needs a
foreign piece either whole or not at all: it needs it exactly when the rank holds a later piece of
the same group. All of this is a handful of array operations over (ranks x pieces).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..modes import PADDING, attention_groups
from ..window import Window
from .runs import first_rows


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces of a micro-batch, as parallel int64 arrays (n,), in token order.

    Token coordinates run over the whole micro-batch: token t of window w is
    ``w * padded_length + t``. Rows are rows of the owner's shard, window after window. Padding has
    no piece.
    """

    start: np.ndarray
    stop: np.ndarray
    window: np.ndarray
    group: np.ndarray
    """Attention group, numbered from 0 over the micro-batch."""
    owner: np.ndarray
    """The rank that holds the piece."""
    row: np.ndarray
    """First row of the piece in its owner's shard."""

    def __len__(self) -> int:
        return len(self.start)

    @property
    def size(self) -> np.ndarray:
        """Number of tokens of each piece."""
        return self.stop - self.start


def make_pieces(
    windows: Sequence[Window], runs: Sequence[np.ndarray], padded_length: int
) -> Pieces:
    """Cut the windows of a micro-batch, window w laid out by ``runs[w]``, into pieces."""
    local_length = padded_length // (int(runs[0][:, 2].max()) + 1)
    columns: list[np.ndarray] = []
    num_groups = 0
    for index, window in enumerate(windows):
        order = np.argsort(runs[index][:, 0])
        run_start, _, run_owner = runs[index][order].T
        run_row = first_rows(runs[index])[order]
        edges = np.union1d(window.cu_seqlens, run_start)
        edges = edges[edges <= window.num_tokens]
        start, stop = edges[:-1], edges[1:]
        run = np.searchsorted(run_start, start, side="right") - 1
        segment = np.searchsorted(window.cu_seqlens, start, side="right") - 1
        docs = attention_groups(window.mode, window.segment_docs[segment])
        assert (docs != PADDING).all(), "windows hold no padding; the layout adds it behind them"
        _, group = np.unique(docs, return_inverse=True)
        offset = index * padded_length
        row = run_row[run] + (start - run_start[run]) + index * local_length
        columns.append(
            np.stack(
                [
                    start + offset,
                    stop + offset,
                    np.full(len(start), index),
                    group + num_groups,
                    run_owner[run],
                    row,
                ]
            )
        )
        num_groups += int(group.max()) + 1
    table = _join_touching(np.concatenate(columns, axis=1).astype(np.int64))
    return Pieces(*table)


def needed(pieces: Pieces, sp_size: int) -> np.ndarray:
    """Which rank needs which foreign piece, bool (P, n).

    Rank r needs piece p when it holds a query of p's group that comes after p. These rows are the
    minimum any exchange must move.
    """
    num_groups = int(pieces.group.max()) + 1
    last = np.full((sp_size, num_groups), -1, dtype=np.int64)
    np.maximum.at(last, (pieces.owner, pieces.group), pieces.start)
    later = last[:, pieces.group] > pieces.start[None, :]
    return later & (pieces.owner[None, :] != np.arange(sp_size)[:, None])


def _join_touching(table: np.ndarray) -> np.ndarray:
    """Join neighbours that differ in nothing: one group, one owner, adjacent tokens and rows.

    In ``full`` mode every document boundary cuts, yet all documents are one group.
    """
    start, stop, window, group, owner, row = table
    same = (
        (start[1:] == stop[:-1])
        & (window[1:] == window[:-1])
        & (group[1:] == group[:-1])
        & (owner[1:] == owner[:-1])
        & (row[1:] == row[:-1] + (stop - start)[:-1])
    )
    first, last = np.r_[True, ~same], np.r_[~same, True]
    joined = table[:, first].copy()
    joined[1] = stop[last]
    return joined
