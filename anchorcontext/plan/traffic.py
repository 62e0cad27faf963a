"""What each rank computes and exchanges, counted from stretches of documents; and its least.

Every rank receives each key row it needs once, from its owner: the minimum, which ``gather`` moves.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .cost import CostModel
from .pieces import Pieces


class Loads(NamedTuple):
    """What every rank has to do in one forward, (P,) each."""

    pairs: np.ndarray
    """Visible (query, key) pairs computed."""
    received: np.ndarray
    """Key rows."""
    sent: np.ndarray
    """Key rows, once for every rank that gets them."""
    peers: np.ndarray
    """Ranks received from or sent to, whichever are more."""

    @property
    def rows(self) -> np.ndarray:
        """Key rows over the busier direction of the rank's link."""
        return np.maximum(self.received, self.sent)

    def seconds(self, local_length: int, cost: CostModel) -> np.ndarray:
        """Modelled seconds of every rank, float64 (P,), with ``local_length`` rows each."""
        return cost.rank_seconds(local_length, self.pairs, self.rows, self.peers)


def rank_loads(cuts: np.ndarray, sp_size: int) -> Loads:
    """The loads of ``sp_size`` ranks.

    Args:
        cuts: int64 (4, n), document, start, stop, rank: tokens ``start .. stop-1`` of a document,
            counted within it, are held by a rank.
    """
    document, start, stop, rank = cuts
    size = stop - start
    pairs = np.bincount(rank, weights=size * (start + stop + 1) / 2, minlength=sp_size)
    # Only documents on several ranks move rows.
    low = np.full(int(document.max(initial=0)) + 1, sp_size)
    high = np.full(len(low), -1)
    np.minimum.at(low, document, rank)
    np.maximum.at(high, document, rank)
    shared = low[document] < high[document]
    document, start, rank, size = document[shared], start[shared], rank[shared], size[shared]
    _, document = np.unique(document, return_inverse=True)
    last = np.full((sp_size, int(document.max(initial=-1)) + 1), -1, dtype=np.int64)
    np.maximum.at(last, (rank, document), start)
    need = last[:, document] > start
    need[rank, np.arange(len(rank))] = False
    received = need @ size
    sent = np.bincount(rank, weights=need.sum(axis=0) * size, minlength=sp_size)
    owner = np.zeros((len(rank), sp_size), dtype=np.float32)
    owner[np.arange(len(rank)), rank] = 1
    linked = need.astype(np.float32) @ owner > 0
    peers = np.maximum(linked.sum(axis=0), linked.sum(axis=1))
    return Loads(pairs, received, sent, peers)


def piece_loads(pieces: Pieces, sp_size: int) -> Loads:
    """:func:`rank_loads` of a micro-batch's pieces."""
    size = pieces.size
    order = np.argsort(pieces.group, kind="stable")
    before = np.cumsum(size[order]) - size[order]
    group = pieces.group[order]
    first = np.r_[True, group[1:] != group[:-1]]
    start = np.empty_like(size)
    start[order] = before - np.maximum.accumulate(np.where(first, before, 0))
    return rank_loads(np.stack([pieces.group, start, start + size, pieces.owner]), sp_size)


def least_seconds(lengths: np.ndarray, local_length: int, sp_size: int, cost: CostModel) -> float:
    """A lower bound of the modelled step time under any layout of S = ``local_length`` rows a rank.

    Two things no layout escapes; the bound is the larger (derived in ``docs/attention.md``).

    *The mean.* The slowest rank takes at least the mean time: all linear work, the mean attention
    work, and of the mean travel the part that never hides. Rows have to travel because no rank
    holds more than S tokens and none does more attention work than fits into the step.

    *The longest document.* Whoever holds its last token holds at most S of its n tokens and
    receives n - S rows from at least ceil(n / S) - 1 ranks. Travel hides behind attention at most
    as long as attention takes, so the rank's time is at least linear work + travel.
    """
    n = np.asarray(lengths, dtype=np.float64)
    attention = float((n * (n + 1) / 2).sum()) / sp_size * cost.seconds_per_pair
    per_row = (1 - cost.hideable) * float(cost.travel_seconds(1, 0)) / sp_size

    def mean(most_seconds: float) -> float:
        most_pairs = most_seconds / cost.seconds_per_pair if cost.seconds_per_pair else np.inf
        return attention + per_row * _least_rows(n, local_length, sp_size, most_pairs)

    # A longer step needs fewer rows: the mean of too short a step is too long, and the mean of
    # that is a bound. Each round is tighter.
    bound = attention
    for _ in range(3):
        bound = mean(mean(bound))
    longest = n.max() - local_length, np.ceil(n.max() / local_length) - 1
    travel = float(cost.travel_seconds(*longest)) if longest[0] > 0 else 0.0
    return local_length * cost.seconds_per_token + max(bound, travel)


def _least_rows(n: np.ndarray, local_length: int, sp_size: int, most_pairs: float) -> float:
    """Rows that documents of ``n`` tokens move if no rank computes more than ``most_pairs``.

    The j ranks that reach farthest into a document hold all that is behind the next one's last
    token: at most j S tokens and j ``most_pairs`` work. That last token is the rows that the two
    receive and hold, and the sum of the last tokens, less the n held, is the rows that move.
    """
    pairs = n * (n + 1) / 2
    long = (n > local_length) | (pairs > most_pairs)
    n, pairs = n[long, None], pairs[long, None]
    ranks = np.arange(1, sp_size)
    left = np.maximum(pairs - ranks * most_pairs, 0)
    last = np.maximum(n - ranks * local_length, (np.sqrt(1 + 8 * left) - 1) / 2)
    # Whole rows, but for rounding: their sum is exact, in whatever order a machine adds.
    return float(np.ceil(np.maximum(last - 1e-6, 0)).sum())
