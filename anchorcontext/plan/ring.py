"""The ring exchange, pruned: a row travels only as far round the ring as someone still needs it.

At step s rank r works on keys that rank ``(r - s) mod P`` owns. A piece p of owner o is still on
its way at distance h when some rank at distance d >= h from o needs it::

    travels[h, p] = any_{d >= h} needed[(o + d) mod P, p]

so the rows on hop h are a subset of those on hop h-1, every rank can drop what nobody behind it
needs, and a hop that nobody needs is not taken. The rows that the ring moves in all are
``sum_{h >= 1, p} travels[h, p] * size[p]``; in mode ``full`` over a zigzag layout that is the
classic ring. Gradients go straight from the rank that computed them to the owner.
"""

from __future__ import annotations

import numpy as np

from .pieces import Pieces
from .steps import Step, Transfer
from .tiling import make_tiles, message, owned


def ring_travels(pieces: Pieces, need: np.ndarray) -> np.ndarray:
    """bool (P, n): is piece p still travelling at distance h from its owner."""
    sp_size = len(need)
    distance = np.arange(sp_size)[:, None]
    by_distance = need[(pieces.owner[None, :] + distance) % sp_size, np.arange(len(pieces))]
    return np.logical_or.accumulate(by_distance[::-1], axis=0)[::-1]


def ring_rows(pieces: Pieces, need: np.ndarray) -> int:
    """Rows the whole group sends in one forward: the closed form of this module's docstring."""
    return int((ring_travels(pieces, need)[1:] * pieces.size).sum())


def ring_arrivals(pieces: Pieces, need: np.ndarray) -> np.ndarray:
    """int64 (P, P): key rows that reach rank j at step i of the ring."""
    sp_size = len(need)
    travels = ring_travels(pieces, need)
    travels[0] = False
    step, piece = np.nonzero(travels)
    place = step * sp_size + (pieces.owner[piece] + step) % sp_size
    counts = np.bincount(place, weights=pieces.size[piece], minlength=sp_size**2)
    return counts.astype(np.int64).reshape(sp_size, sp_size)


def ring_steps(pieces: Pieces, need: np.ndarray, rank: int, num_rows: int) -> tuple[Step, ...]:
    """The steps of ``rank``; trailing steps in which it does nothing are left out."""
    sp_size = len(need)
    travels = ring_travels(pieces, need)
    mine = owned(pieces, rank)
    steps = [Step(num_rows=num_rows, tiles=make_tiles(pieces, mine, mine, pieces.row[mine]))]
    held, held_row = mine, pieces.row[mine]
    for step in range(1, sp_size):
        owner, user = (rank - step) % sp_size, (rank + step) % sp_size
        coming = owned(pieces, owner)
        coming = coming[travels[step, coming]]
        coming_size = pieces.size[coming]
        coming_row = np.cumsum(coming_size) - coming_size
        onward = travels[step, held]
        used = need[rank, coming]
        returned = mine[need[user, mine]]
        steps.append(
            Step(
                num_rows=int(coming_size.sum()),
                tiles=make_tiles(pieces, mine, coming[used], coming_row[used]),
                incoming=Transfer(
                    sends=message(
                        (rank + 1) % sp_size, held_row[onward], pieces.size[held][onward]
                    ),
                    receives=message((rank - 1) % sp_size, coming_row, coming_size),
                ),
                returns=Transfer(
                    sends=message(owner, coming_row[used], coming_size[used]),
                    receives=message(user, pieces.row[returned], pieces.size[returned]),
                ),
                held=coming,
            )
        )
        held, held_row = coming, coming_row
    while len(steps) > 1 and _idle(steps[-1]):
        steps.pop()
    return tuple(steps)


def _idle(step: Step) -> bool:
    return not (len(step.tiles) or step.incoming.busy or step.returns.busy)
