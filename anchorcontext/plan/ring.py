"""The ring exchange, pruned: a row travels only as far round the ring as someone still needs it.

At step s rank r works on keys that rank ``(r - s) mod P`` owns. A piece p of owner o is still on
its way at distance h when some rank at distance d >= h from o needs it::

    travels[h, p] = any_{d >= h} needed[(o + d) mod P, p]

so the rows on hop h are a subset of those on hop h-1, every rank can drop what nobody behind it
needs, and a hop that nobody needs is not taken. The rows that the ring moves in all are
``sum_{h >= 1, p} travels[h, p] * size[p]``; in mode ``full`` over a zigzag layout that is the
classic ring.
"""

from __future__ import annotations

import numpy as np

from anchorcontext.kernels.interface import Tiles

from .pieces import Pieces
from .steps import Message, Rows, Step, Transfer


def ring_travels(pieces: Pieces, need: np.ndarray) -> np.ndarray:
    """bool (P, n): is piece p still travelling at distance h from its owner."""
    sp_size = len(need)
    distance = np.arange(sp_size)[:, None]
    by_distance = need[(pieces.owner[None, :] + distance) % sp_size, np.arange(len(pieces))]
    return np.logical_or.accumulate(by_distance[::-1], axis=0)[::-1]


def ring_rows(pieces: Pieces, need: np.ndarray) -> int:
    """Rows the whole group sends in one forward: the closed form of this module's docstring."""
    return int((ring_travels(pieces, need)[1:] * pieces.size).sum())


def ring_steps(pieces: Pieces, need: np.ndarray, rank: int, num_rows: int) -> tuple[Step, ...]:
    """The steps of ``rank``; trailing steps in which it does nothing are left out."""
    sp_size = len(need)
    travels = ring_travels(pieces, need)
    mine = _owned(pieces, rank)
    steps = [Step(num_rows=num_rows, tiles=make_tiles(pieces, mine, mine, pieces.row[mine]))]
    held, held_row = mine, pieces.row[mine]
    for step in range(1, sp_size):
        owner = (rank - step) % sp_size
        coming = _owned(pieces, owner)
        coming = coming[travels[step, coming]]
        coming_size = pieces.size[coming]
        coming_row = np.cumsum(coming_size) - coming_size
        onward = travels[step, held]
        used = need[rank, coming]
        user = (rank + step) % sp_size
        returned = mine[need[user, mine]]
        steps.append(
            Step(
                num_rows=int(coming_size.sum()),
                tiles=make_tiles(pieces, mine, coming[used], coming_row[used]),
                incoming=Transfer(
                    sends=_message(
                        (rank + 1) % sp_size, held_row[onward], pieces.size[held][onward]
                    ),
                    receives=_message((rank - 1) % sp_size, coming_row, coming_size),
                ),
                returns=Transfer(
                    sends=_message(owner, coming_row[used], coming_size[used]),
                    receives=_message(user, pieces.row[returned], pieces.size[returned]),
                ),
            )
        )
        held, held_row = coming, coming_row
    while len(steps) > 1 and _idle(steps[-1]):
        steps.pop()
    return tuple(steps)


def make_tiles(pieces: Pieces, queries: np.ndarray, keys: np.ndarray, key_row: np.ndarray) -> Tiles:
    """The tiles of query pieces against key pieces whose rows start at ``key_row`` in a buffer.

    A piece sees itself causally and every earlier piece of its group in full; neighbouring full
    key pieces of one query piece become one tile.
    """
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
    return Tiles(_join_full(tiles))


def _join_full(tiles: np.ndarray) -> np.ndarray:
    """Join full tiles of the same queries whose keys touch."""
    if len(tiles) < 2:
        return tiles
    before, after = tiles[:-1], tiles[1:]
    joins = (
        (before[:, 0] == after[:, 0])
        & (before[:, 3] == after[:, 2])
        & (before[:, 4] == 0)
        & (after[:, 4] == 0)
    )
    first, last = np.r_[True, ~joins], np.r_[~joins, True]
    joined = tiles[first].copy()
    joined[:, 3] = tiles[last, 3]
    return joined


def _owned(pieces: Pieces, rank: int) -> np.ndarray:
    """The pieces of a rank in the order of its rows: both ends of a message list them alike."""
    index = np.flatnonzero(pieces.owner == rank)
    return index[np.argsort(pieces.row[index], kind="stable")]


def _message(peer: int, start: np.ndarray, size: np.ndarray) -> tuple[Message, ...]:
    return (Message(peer, Rows.of(start, size)),) if len(start) else ()


def _idle(step: Step) -> bool:
    moves = (*step.incoming.sends, *step.incoming.receives)
    homecoming = (*step.returns.sends, *step.returns.receives)
    return not (len(step.tiles) or moves or homecoming)
