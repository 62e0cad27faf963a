"""The gather exchange: every rank receives exactly the key rows its queries need, at once.

Two steps: the rank's own keys, and while they are computed all foreign rows it needs travel
straight from their owners. The rows received are the minimum any exchange can move; in exchange for
one message a peer the rank holds all of them together (up to L rows in mode ``full``). In the
second buffer the keys of one document lie side by side in token order, so every query piece is one
tile.
"""

from __future__ import annotations

import numpy as np

from .pieces import Pieces
from .steps import Message, Step, Transfer
from .tiling import make_tiles, message, owned


def gather_steps(pieces: Pieces, need: np.ndarray, rank: int, num_rows: int) -> tuple[Step, ...]:
    """The steps of ``rank``: its own keys, then the foreign ones (left out when it has no part)."""
    mine = owned(pieces, rank)
    own = Step(num_rows=num_rows, tiles=make_tiles(pieces, mine, mine, pieces.row[mine]))
    foreign = np.flatnonzero(need[rank])
    foreign = foreign[np.lexsort((pieces.start[foreign], pieces.group[foreign]))]
    incoming, buffer_row = gathered(pieces, need, rank, foreign)
    if not incoming.busy:
        return (own,)
    second = Step(
        num_rows=int(pieces.size[foreign].sum()),
        tiles=make_tiles(pieces, mine, foreign, buffer_row[foreign]),
        incoming=incoming,
        # Gradients take the same rows the other way.
        returns=Transfer(sends=incoming.receives, receives=incoming.sends),
        held=foreign,
    )
    return (own, second)


def gathered(
    pieces: Pieces, need: np.ndarray, rank: int, held: np.ndarray
) -> tuple[Transfer, np.ndarray]:
    """How ``rank`` fills a buffer with the pieces ``held``, one behind the other.

    Returns the transfer that brings the foreign ones, each straight from its owner, and int64 (n,)
    the first row in the buffer of each piece of ``held``.
    """
    size = pieces.size[held]
    buffer_row = np.zeros(len(pieces), dtype=np.int64)
    buffer_row[held] = np.cumsum(size) - size
    mine = owned(pieces, rank)
    receives: list[Message] = []
    sends: list[Message] = []
    for peer in range(len(need)):
        theirs = owned(pieces, peer)
        theirs = theirs[need[rank, theirs]]
        receives += message(peer, buffer_row[theirs], pieces.size[theirs])
        asked = mine[need[peer, mine]]
        sends += message(peer, pieces.row[asked], pieces.size[asked])
    return Transfer(sends=tuple(sends), receives=tuple(receives)), buffer_row
