"""``exchange: auto``: gather where it costs no more memory than a ring would, else ring.

Gather moves the minimum of rows in one message a peer; a ring moves a row over every hop up to its
farthest reader. What speaks for the ring is memory: it holds two shards of foreign rows at a time
(one computed on, one arriving), gather all rows that a rank needs. Packed documents need few rows,
so gather wins there; in mode ``full`` a rank needs nearly the whole window, and from four ranks on
the ring is what keeps memory at O(L / P).
"""

from __future__ import annotations

import logging

import numpy as np

from .pieces import Pieces
from .ring import ring_rows

RING_SHARDS = 2

_logger = logging.getLogger(__name__)
_told: set[str] = set()


def choose_exchange(pieces: Pieces, need: np.ndarray, shard_rows: int) -> str:
    """``"gather"`` or ``"ring"`` for a micro-batch; logs each choice once, with its first numbers.

    Args:
        pieces: of the micro-batch.
        need: bool (P, n), which rank needs which foreign piece.
        shard_rows: rows of one rank, windows x tokens.
    """
    gathered = need @ pieces.size
    most = int(gathered.max())
    choice = "gather" if most <= RING_SHARDS * shard_rows else "ring"
    if choice not in _told and len(need) > 1:
        _told.add(choice)
        _logger.info(
            "exchange auto: %s; a rank needs at most %d foreign rows, a ring holds %d at a time; "
            "in all, gather moves %d rows and the ring %d",
            *(choice, most, RING_SHARDS * shard_rows, int(gathered.sum()), ring_rows(pieces, need)),
        )
    return choice
