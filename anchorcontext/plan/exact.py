"""The exact setting of the gather exchange: forward has the same bits on any number of ranks.

The rank puts its own rows and the foreign ones it needs side by side, documents one after the
other, tokens in order. The keys of a query piece are then one tile that starts with the first key
of its document, as on a single device, and the engine computes it in blocks of the document
(:class:`~anchorcontext.kernels.Tiles`, ``exact``). The price beside :mod:`.gather`: nothing is
computed while rows travel, own rows are copied, and a block that two ranks share is computed twice.
"""

from __future__ import annotations

import numpy as np

from .gather import gathered
from .pieces import Pieces
from .steps import Rows, Step, Transfer
from .tiling import make_tiles, owned


def exact_steps(pieces: Pieces, need: np.ndarray, rank: int, num_rows: int) -> tuple[Step, ...]:
    """The steps of ``rank``: its own rows, with no tile, then all it needs; one step where its
    rows lie in document order already and no other rank takes part."""
    mine = owned(pieces, rank)
    held = np.flatnonzero(need[rank] | (pieces.owner == rank))
    held = held[np.lexsort((pieces.start[held], pieces.group[held]))]
    incoming, buffer_row = gathered(pieces, need, rank, held)
    if not incoming.busy and _in_order(pieces, held):
        tiles = make_tiles(pieces, mine, mine, pieces.row[mine], exact=True)
        return (Step(num_rows=num_rows, tiles=tiles),)
    none = np.zeros(0, dtype=np.int64)
    return (
        Step(num_rows=num_rows, tiles=make_tiles(pieces, none, none, none)),
        Step(
            num_rows=int(pieces.size[held].sum()),
            tiles=make_tiles(pieces, mine, held, buffer_row[held], exact=True),
            incoming=incoming,
            returns=Transfer(sends=incoming.receives, receives=incoming.sends),
            kept=(
                Rows.of(pieces.row[mine], pieces.size[mine]),
                Rows.of(buffer_row[mine], pieces.size[mine]),
            ),
            held=held,
        ),
    )


def _in_order(pieces: Pieces, held: np.ndarray) -> bool:
    """Whether the pieces of each group lie one behind the other in the rank's own rows."""
    same = pieces.group[held][1:] == pieces.group[held][:-1]
    follows = pieces.row[held][1:] == (pieces.row + pieces.size)[held][:-1]
    return bool((follows | ~same).all())
