"""Trades: the slowest rank of a layout gives tokens away and takes as many that cost less.

A document may be cut anywhere, so a rank can give the last t tokens of one of its stretches and
take the last t of another rank's. What that does to the work and the rows of both is known in
closed form, but for some effects on messages and on third ranks. So all trades between the slowest
rank and some of the fastest are tabled, each for the t that makes the two equally fast, and the
best of the table is carried out if an exact count confirms it.

A trade is confirmed when it lowers the sum over the ranks of their squared lateness. The maximum
alone would refuse to relieve one of several equally late ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .cost import CostModel
from .traffic import Loads, rank_loads

MOST_TRADES = 12
"""Trades carried out at most: about half a millisecond each on 64 ranks."""
MOST_COUNTED = 6
"""Trades of one table counted exactly before the layout is taken as it is."""
WORTHWHILE = 0.995
"""The share of the lateness that a trade may leave: no document is cut for less."""
NUM_PARTNERS = 8
"""The fastest ranks, which the slowest may trade with."""
MOST_GIVEN, MOST_TAKEN = 12, 48
"""Stretches of the slowest rank and of its partners in one table: their largest."""


def trade_tokens(
    cuts: np.ndarray, local_length: int, sp_size: int, cost: CostModel, goal: float
) -> np.ndarray:
    """Even out the ranks until none is later than ``goal`` seconds or no trade helps.

    Args:
        cuts: int64 (4, n), document, start, stop, rank of every stretch of a layout; no padding.

    Returns:
        The cuts with the least modelled step time that was met, int64 (4, m). Every rank holds as
        many tokens as before.
    """
    cuts = _join(cuts)
    loads = rank_loads(cuts, sp_size)
    seconds = loads.seconds(local_length, cost)
    best, best_seconds = cuts, seconds.max()
    for _ in range(MOST_TRADES):
        if best_seconds <= goal:
            break
        late = _lateness(seconds, goal)
        for trade in _Table(cuts, loads, seconds, local_length, cost).trades():
            traded = _swap(cuts, *trade)
            loads = rank_loads(traded, sp_size)
            seconds = loads.seconds(local_length, cost)
            if _lateness(seconds, goal) < WORTHWHILE * late:
                break
        else:
            break
        cuts = traded
        if seconds.max() < best_seconds:
            best, best_seconds = cuts, seconds.max()
    return best


def _lateness(seconds: np.ndarray, goal: float) -> float:
    """Exactly summed, so that it is the same in whatever order a machine adds."""
    late = np.maximum(seconds / goal - 1, 0)
    return math.fsum((late * late).tolist())


def _swap(cuts: np.ndarray, given: int, taken: int, tokens: int) -> np.ndarray:
    """The cuts after the last ``tokens`` of two of them have changed ranks."""
    moved = cuts[:, [given, taken]]
    moved[1] = moved[2] - tokens
    moved[3] = moved[3, ::-1]
    cuts = cuts.copy()
    cuts[2, [given, taken]] -= tokens
    return _join(np.concatenate([cuts, moved], axis=1))


def _join(cuts: np.ndarray) -> np.ndarray:
    """Sorted by rank, document and start; stretches that touch are one, empty ones gone."""
    cuts = cuts[:, cuts[1] < cuts[2]]
    cuts = cuts[:, np.lexsort((cuts[1], cuts[0], cuts[3]))]
    document, start, stop, rank = cuts
    touch = (rank[1:] == rank[:-1]) & (document[1:] == document[:-1]) & (start[1:] == stop[:-1])
    joined = cuts[:, np.r_[True, ~touch]]
    joined[2] = stop[np.r_[~touch, True]]
    return joined


class _Effects(NamedTuple):
    """What giving tokens away adds to the rows of both ranks, and the work that goes with them."""

    work: np.ndarray
    giver_received: np.ndarray
    giver_sent: np.ndarray
    taker_received: np.ndarray
    taker_sent: np.ndarray


@dataclass(frozen=True)
class _Offers:
    """Stretches that may be given away from their end: arrays that broadcast against a table."""

    column: np.ndarray
    """Of the cuts."""
    document: np.ndarray
    rank: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    kept: np.ndarray
    """1 where the rank holds later tokens of the document and needs what it gave, else 0."""
    before: np.ndarray
    """Tokens of the document that the rank holds before the stretch."""
    previous: np.ndarray
    """Where those end; 0 without any."""
    readers: np.ndarray
    """Other ranks that need the keys of the stretch."""

    def give(self, tokens: np.ndarray, last: np.ndarray) -> _Effects:
        """The effects of giving the last ``tokens`` of each stretch to some rank.

        A rank receives the rows of a document before the end of what it holds, less its own.

        Args:
            last: where the end of what the taker already holds of the document is; 0 for nothing.
        """
        left = self.stop - self.start - tokens
        gone = (left + self.kept) == 0
        return _Effects(
            work=tokens * (self.stop + 0.5 - tokens / 2),
            giver_received=np.where(gone, self.previous - self.start, tokens * self.kept),
            giver_sent=(last == 0) * (self.before + left) - tokens * self.readers,
            taker_received=np.maximum(self.stop - last, 0) - tokens,
            taker_sent=tokens * (self.readers - (last > self.start) + self.kept),
        )


class _Table:
    """All trades of the slowest rank (rows: what it gives) with its partners (columns)."""

    def __init__(
        self,
        cuts: np.ndarray,
        loads: Loads,
        seconds: np.ndarray,
        local_length: int,
        cost: CostModel,
    ) -> None:
        self.cuts, self.loads, self.seconds = cuts, loads, seconds
        self.local_length, self.cost = local_length, cost
        document, start, stop, rank = cuts
        same = (rank[1:] == rank[:-1]) & (document[1:] == document[:-1])
        self.first, self.final = np.r_[True, ~same], np.r_[~same, True]
        total = np.cumsum(stop - start) - (stop - start)
        self.before = total - np.maximum.accumulate(np.where(self.first, total, 0))
        self.last = np.zeros((len(seconds), int(document.max()) + 1))
        self.last[rank[self.final], document[self.final]] = stop[self.final]
        self.slowest = int(seconds.argmax())
        partner = np.zeros(len(seconds), dtype=bool)
        partner[np.argsort(seconds, kind="stable")[:NUM_PARTNERS]] = True
        partner[self.slowest] = False
        self.given = self._offers(rank == self.slowest, MOST_GIVEN, (-1, 1))
        self.taken = self._offers(partner[rank], MOST_TAKEN, (1, -1))
        self.last_of_partner = self.last[self.taken.rank, self.given.document]
        self.last_of_slowest = self.last[self.slowest, self.taken.document]

    def trades(self) -> Iterator[tuple[int, int, int]]:
        """The best trade of every row, best first, of those that promise to help.

        Given and taken column of the cuts, and tokens.
        """
        worst, tokens = self._even_out()
        if not worst.size:  # a side holds nothing but padding
            return
        best = worst.argmin(axis=1)
        worst, tokens = (
            np.take_along_axis(table, best[:, None], axis=1)[:, 0] for table in (worst, tokens)
        )
        for row in np.argsort(worst, kind="stable")[:MOST_COUNTED].tolist():
            if worst[row] < self.seconds[self.slowest]:
                given, taken = self.given.column[row, 0], self.taken.column[0, best[row]]
                yield int(given), int(taken), int(tokens[row])

    def _even_out(self) -> tuple[np.ndarray, np.ndarray]:
        """After each trade the later rank's seconds; the tokens traded.

        Tokens are all that can be, or as many as make both ranks equally fast if their times are
        straight lines between none and all.
        """
        most = np.minimum(self.given.stop - self.given.start, self.taken.stop - self.taken.start)
        mine, theirs = self._after(np.stack([np.zeros_like(most), most]))
        none, every = mine - theirs
        even = most * none / np.maximum(none - every, 1e-30)
        even = np.minimum(np.maximum(np.rint(even), 1), most)
        later = np.maximum(*self._after(even))
        worst = np.maximum(mine[1], theirs[1])
        return np.minimum(later, worst), np.where(later < worst, even, most)

    def _after(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of the slowest rank and of its partner after each trade."""
        gives = self.given.give(tokens, self.last_of_partner)
        takes = self.taken.give(tokens, self.last_of_slowest)
        gain = takes.work - gives.work
        return (
            self._seconds(self.slowest, gain, gives, takes),
            self._seconds(self.taken.rank, -gain, takes, gives),
        )

    def _seconds(
        self, rank: np.ndarray | int, gain: np.ndarray, gives: _Effects, takes: _Effects
    ) -> np.ndarray:
        pairs, received, sent, peers = self.loads
        rows = np.maximum(
            received[rank] + gives.giver_received + takes.taker_received,
            sent[rank] + gives.giver_sent + takes.taker_sent,
        )
        return self.cost.rank_seconds(self.local_length, pairs[rank] + gain, rows, peers[rank])

    def _offers(self, chosen: np.ndarray, count: int, shape: tuple[int, int]) -> _Offers:
        """The ``count`` largest of the chosen stretches."""
        column = np.flatnonzero(chosen)
        size = self.cuts[2, column] - self.cuts[1, column]
        column = column[np.argsort(-size, kind="stable")[:count]]
        document, start, stop, rank = self.cuts[:, column]
        facts = (
            start,
            stop,
            ~self.final[column],
            self.before[column],
            np.where(self.first[column], 0, self.cuts[2, column - 1]),
            (self.last[:, document] > start).sum(axis=0) - 1,
        )
        # Of one type: integers would be converted at every use.
        table = np.array(facts, dtype=np.float64).reshape(len(facts), *shape)
        return _Offers(*(values.reshape(shape) for values in (column, document, rank)), *table)
