"""Dealing documents to ranks: long ones in shares, the others whole where they fit.

A token's attention costs its position in its document, so a stretch of a document has a *density*:
work per token. A document of n tokens has density (n + 1) / 2, and so has every *share* of it that
takes equally many tokens from its front and its back, whatever is left between them: zigzag inside
the document, with shares of any size. Four stages, longest documents first:

1. **Deal.** With the other documents at their mean density sigma, a rank of S tokens that does
   the mean work has room for an *excess* of ``mean work - S * sigma``; t tokens of a document of
   density delta take ``t * (delta - sigma)`` of it. Documents whose excess is more than a rank's,
   and dense ones of more than ``WIDE`` of a rank's rows, are *long* and are dealt to neighbouring
   ranks, in one of the ``WAYS``.
2. **Place.** Every other document goes whole to the rank that should finish first among those
   with room for its tokens. Where none has, one of the emptiest ranks is filled with a part of it
   and the rest waits its turn.
3. **Pour.** The many shortest documents and the padding fill what is left, in token order.
4. **Level.** A share of t tokens may take more from the back (more work) or from the front; the
   long documents' shares are shifted so that their ranks finish together, travel included.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np

from .cost import CostModel

WAYS = ("own", "chunks", "fill")
"""How long documents are dealt.

``own``: in equal shares to ranks that hold no other long document. ``fill``: each rank takes up to
its excess and the next document goes on where one ended; evener, more travel. ``chunks``: documents
longer than a rank fill whole ranks with consecutive tokens from their end, their head is placed
like a short document; least travel."""
WIDE = 0.25
MOST_PLACED = 512
"""Documents placed one by one; shorter ones are poured."""


@dataclass
class Cuts:
    """Stretches ``[start, stop)`` of documents (token numbers within each) with their rank."""

    document: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    stop: list[int] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)

    def add(self, document: int, start: int, stop: int, rank: int) -> None:
        """Give a stretch to a rank; nothing where it is empty."""
        if start < stop:
            self.document.append(document)
            self.start.append(start)
            self.stop.append(stop)
            self.rank.append(rank)

    def array(self) -> np.ndarray:
        """int64 (4, n): document, start, stop, rank."""
        return np.array([self.document, self.start, self.stop, self.rank], dtype=np.int64)


class Dealer:
    """One attempt: the documents still to place and the room left on every rank."""

    def __init__(
        self,
        lengths: np.ndarray,
        local_length: int,
        sp_size: int,
        cost: CostModel,
        least: float,
    ) -> None:
        self.order = np.argsort(-lengths, kind="stable")
        self.lengths, self.padding = lengths, sp_size * local_length - int(lengths.sum())
        self.hideable = cost.hideable
        self.pairs_per_row = float(cost.travel_seconds(1, 0)) / cost.seconds_per_pair
        self.aim = (least - local_length * cost.seconds_per_token) / cost.seconds_per_pair
        n = lengths[self.order].astype(np.float64)
        work = n * (n + 1) / 2
        mean = float(work.sum()) / sp_size
        # Of the documents from each one on, padding included: tokens, work, density.
        rest_tokens = np.cumsum(np.r_[self.padding, n[::-1]])[::-1]
        rest_work = np.cumsum(np.r_[0.0, work[::-1]])[::-1]
        sigma = rest_work / np.maximum(rest_tokens, 1)
        density = (n + 1) / 2
        room = mean - local_length * sigma[:-1]
        # Not below the mean density, by more than rounding: equal documents are all dense.
        dense = density > (1 - 1e-9) * mean / local_length
        long = (n * (density - sigma[:-1]) > room) | ((n > WIDE * local_length) & dense)
        self.num_long = int(np.argmin(long)) if not long.all() else len(n)
        self.sigma = float(sigma[self.num_long])
        self.room = max(mean - local_length * self.sigma, 1.0)
        self.local_length, self.sp_size = local_length, sp_size
        self.free = np.full(sp_size, local_length, dtype=np.int64)
        self.work = np.zeros(sp_size)
        self.received, self.sent = np.zeros(sp_size), np.zeros(sp_size)
        # Kept for speed, in pairs: travel, and work with the part of travel that never hides.
        self.travel, self.shown = np.zeros(sp_size), np.zeros(sp_size)
        self.shares: list[tuple[int, int, int]] = []
        self.cuts = Cuts()

    def deal(self, way: str) -> np.ndarray | None:
        """Run the stages: int64 (4, m) as in :class:`Cuts`; None where the way does not exist."""
        heads: list[tuple[int, int]] = []
        if way == "chunks":
            long = self.order[: int((self.lengths > self.local_length).sum())].tolist()
            heads = self._deal_chunks(long)
        else:
            long = self.order[: self.num_long].tolist()
            shares = self._fill_ranks(long) if way == "fill" else self._own_ranks()
            if shares is None:
                return None
            self.shares = shares
            self._count_shares()
        placed = self.order[len(long) : len(long) + MOST_PLACED].tolist()
        self._place(heads + [(document, int(self.lengths[document])) for document in placed])
        self._pour(np.sort(self.order[len(long) + MOST_PLACED :]))
        self._level()
        return self.cuts.array()

    def _fill_ranks(self, long: list[int]) -> list[tuple[int, int, int]]:
        """Shares (document, rank, tokens): rank after rank filled to its excess."""
        shares = []
        free, room = [self.local_length] * self.sp_size, [self.room] * self.sp_size
        rank, last_rank, least = 0, self.sp_size - 1, 0.02 * self.room
        for document in long:
            left = int(self.lengths[document])
            excess = max((left + 1) / 2 - self.sigma, 1e-9)
            while left:
                while rank < last_rank and (room[rank] <= least or not free[rank]):
                    rank += 1
                full = not free[rank]
                if full:  # rounding: the innermost tokens go wherever there is room
                    rank = max(range(self.sp_size), key=lambda r: free[r])
                share = min(left, free[rank])
                if rank < last_rank and not full:
                    share = min(share, max(1, round(room[rank] / excess)))
                shares.append((document, rank, share))
                free[rank] -= share
                room[rank] -= share * excess
                left -= share
        return shares

    def _count_shares(self) -> None:
        """Book the shares on their ranks as if each were half front, half back."""
        count = np.bincount([document for document, _, _ in self.shares], minlength=1)
        place, before = 0, -1
        for document, rank, tokens in self.shares:
            place = place + 1 if document == before else 0
            before = document
            length = int(self.lengths[document])
            self.free[rank] -= tokens
            self.work[rank] += tokens * (length + 1) / 2
            # Share i of k: all others need its front, those dealt before it its back.
            self.received[rank] += max(length - tokens * (1 + place / 2), 0)
            self.sent[rank] += tokens * (int(count[document]) - 1 + place) / 2
            self._book_travel(rank)

    def _own_ranks(self) -> list[tuple[int, int, int]] | None:
        """Shares (document, rank, tokens): equal ones on ranks that hold one long document each.

        The largest share's excess is as small as the number of ranks allows; None where even
        the fewest ranks the tokens fit on are too many.
        """
        n = self.lengths[self.order[: self.num_long]]
        excess = n * np.maximum((n + 1) / 2 - self.sigma, 0)
        fewest = -(-n // self.local_length)
        if int(fewest.sum()) > self.sp_size or not len(n):
            return None
        low, high = self.room / 2, max(float(excess.max()), self.room)
        for _ in range(12):
            middle = (low + high) / 2
            fits = np.maximum(fewest, np.ceil(excess / middle)).sum() <= self.sp_size
            low, high = (low, middle) if fits else (middle, high)
        count = np.maximum(fewest, np.ceil(excess / high)).astype(np.int64)
        shares, rank = [], 0
        for document, tokens, ranks in zip(
            self.order.tolist(), n.tolist(), count.tolist(), strict=False
        ):
            for member in range(ranks):
                share = tokens * (member + 1) // ranks - tokens * member // ranks
                shares.append((document, rank + member, share))
            rank += ranks
        return shares

    def _deal_chunks(self, long: list[int]) -> list[tuple[int, int]]:
        """Consecutive tokens from the end of each document, a rank's worth to each rank.

        Returns what is left of the documents: (document, tokens from its start).
        """
        heads: list[tuple[int, int]] = []
        rank = 0
        for document in long:
            edges = [int(self.lengths[document])]
            while edges[-1] > self.local_length and rank + len(edges) <= self.sp_size:
                edges.append(edges[-1] - self._chunk(edges[-1]))
            heads.append((document, edges[-1]))
            # Later tokens on later ranks: a ring then carries keys one short way.
            for start, stop in pairwise(reversed(edges)):
                self._hold(document, start, stop, rank)
                rank += 1
        return heads

    def _chunk(self, stop: int) -> int:
        """How many tokens before ``stop`` a rank takes: all its rows, or fewer where its attention
        would outlast the travel that it hides and the rank be late."""
        full = self.local_length
        travel = (stop - full) * self.pairs_per_row
        load = _pairs(stop - full, stop) + travel * (1 - self.hideable)
        if load <= self.aim:
            return full
        size = float(full)
        for _ in range(3):
            size = self.hideable * self.pairs_per_row * (stop - size) / (stop - size / 2)
            size = min(size, full)
        return int(size) if 2 * size > full else full

    def _level(self) -> None:
        """Write the shares' cuts: the ranks of a document finish together where they can."""
        for document, group in groupby(self.shares, key=itemgetter(0)):
            start, stop = 0, int(self.lengths[document])
            shares = [(rank, tokens) for _, rank, tokens in group]
            for rank, tokens in shares:
                self.shown[rank] -= tokens * (stop + 1) / 2
            target = (_pairs(0, stop) + sum(self.shown[rank] for rank, _ in shares)) / len(shares)
            for rank, tokens in shares:
                inside = stop - start - tokens
                front = tokens
                if inside:
                    # Work of x tokens from the front, the others from the back: linear in x.
                    most = tokens * stop - tokens * (tokens - 1) / 2
                    wanted = target - self.shown[rank]
                    front = min(max(round((most - wanted) / inside), 0), tokens)
                back = stop - (tokens - front)
                self.cuts.add(document, start, start + front, rank)
                self.cuts.add(document, back, stop, rank)
                self.shown[rank] += _pairs(start, start + front) + _pairs(back, stop)
                start, stop = start + front, back

    def _place(self, heads: list[tuple[int, int]]) -> None:
        """Place documents, each given with its tokens from its start that are still to place."""
        free = self.free
        tokens = float(sum(size for _, size in heads))
        pairs = sum(_pairs(0, size) for _, size in heads)
        waiting = [(-size, document, 0, size) for document, size in heads]
        heapq.heapify(waiting)
        while waiting:
            _, document, start, stop = heapq.heappop(waiting)
            size = stop - start
            sigma = max(pairs - _pairs(start, stop), 0.0) / max(tokens - size, 1)
            load = self._load(start, stop, sigma)
            load[free < size] = np.inf
            rank = int(load.argmin())
            begin, end = start, stop
            if free[rank] < size:
                most = int(free.max())
                load = self._load(start, start + most, sigma)
                load[2 * free < most] = np.inf
                rank = int(load.argmin())
                part = int(free[rank])
                begin, end, left = stop - part, stop, (start, stop - part)
                if self._load(begin, end, sigma)[rank] > self.aim:
                    begin, end, left = start, start + part, (start + part, stop)
                heapq.heappush(waiting, (left[0] - left[1], document, *left))
            self._hold(document, begin, end, rank, sent=end - begin if end < stop else 0)
            tokens, pairs = tokens - (end - begin), pairs - _pairs(begin, end)

    def _load(self, start: int, stop: int, sigma: float) -> np.ndarray:
        """Expected attention and exposed travel of each rank if it takes a stretch of a document.

        In pairs, float64 (P,): ``max(attention + never hidden travel, travel)``. What else the rank
        will hold has density ``sigma`` and needs no travel.
        """
        shown, travel = self.shown, self.travel
        if start:
            travel = np.maximum(self.received + start, self.sent) * self.pairs_per_row
            shown = self.work + travel * (1 - self.hideable)
        load = self.free * sigma
        load += shown
        load += _pairs(start, stop) - (stop - start) * sigma
        return np.maximum(load, travel, out=load)

    def _hold(self, document: int, start: int, stop: int, rank: int, sent: int = 0) -> None:
        if start < stop:
            self.cuts.add(document, start, stop, rank)
            self.free[rank] -= stop - start
            self.work[rank] += _pairs(start, stop)
            self.received[rank] += start
            self.sent[rank] += sent
            self._book_travel(rank)

    def _book_travel(self, rank: int) -> None:
        travel = max(self.received[rank], self.sent[rank]) * self.pairs_per_row
        self.travel[rank] = travel
        self.shown[rank] = self.work[rank] + travel * (1 - self.hideable)

    def _pour(self, documents: np.ndarray) -> None:
        """Fill the free rows of all ranks, rank by rank, with documents and then padding."""
        sizes = np.r_[self.lengths[documents], self.padding]
        names = np.r_[documents, len(self.lengths)]
        first = np.cumsum(sizes) - sizes
        edges = np.unique(np.r_[first, np.cumsum(self.free), 0])
        total = int(self.free.sum())
        begin = edges[edges < total]
        end = np.r_[begin[1:], total]
        index = np.searchsorted(first, begin, side="right") - 1
        rank = np.searchsorted(np.cumsum(self.free), begin, side="right")
        for column, values in (
            (self.cuts.document, names[index]),
            (self.cuts.start, begin - first[index]),
            (self.cuts.stop, end - first[index]),
            (self.cuts.rank, rank),
        ):
            column.extend(values.tolist())


def _pairs(start: int, stop: int) -> float:
    """Visible pairs of the tokens ``start .. stop-1`` of a document."""
    return (stop - start) * (start + stop + 1) / 2
