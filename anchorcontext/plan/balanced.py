"""The layout ``balanced``: documents whole where they fit, equal tokens and equal work.

A token's attention costs its position in its document, so a stretch of a document has a *density*:
work per token. A document of n tokens has density (n + 1) / 2, and so has every *share* of it that
takes equally many tokens from its front and its back, whatever is left between them: zigzag inside
the document, with shares of any size. Three stages, longest documents first:

1. **Deal.** With the other documents at their mean density sigma, a rank of S tokens whose work may
   reach ``cap`` has room for an *excess* of ``cap - S * sigma``; t tokens of a document of density
   delta take ``t * (delta - sigma)`` of it. Documents whose excess is more than a rank's are
   *long*: they are dealt in shares to neighbouring ranks, each filled up to its excess.
2. **Place.** Every other document goes whole to the rank with the largest excess left that has
   room for its tokens. Where none has, the emptiest rank is filled with a part of it, from its
   front or its back, whichever is nearer the density that rank still needs; the rest waits its
   turn.
3. **Pour.** The many shortest documents and the padding fill what is left, in token order.

How far ``cap`` lies above the mean work trades balance for fewer cuts and less travel. A few values
are tried and the modelled step time (:mod:`.cost`) decides. Everything is integers and IEEE double
arithmetic in a fixed order: equal inputs give equal layouts on every rank.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from ..window import Window
from .cost import CostModel
from .runs import join_runs

SLACKS = (0.0, 0.01, 0.03)
"""Tried shares of the step time by which a rank's work may exceed the mean."""
MOST_PLACED = 512
"""Documents placed one by one; shorter ones are poured."""
BLOCK = 128
"""Cuts inside a long document lie on multiples of this where the shares allow it."""


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


def balanced(window: Window, padded_length: int, sp_size: int, cost: CostModel) -> np.ndarray:
    """The runs of the layout, int64 (n, 3), for a window padded to ``padded_length`` tokens."""
    if sp_size == 1:
        return np.array([[0, padded_length, 0]], dtype=np.int64)
    _, document = np.unique(window.segment_docs, return_inverse=True)
    lengths = np.bincount(document, weights=np.diff(window.cu_seqlens)).astype(np.int64)
    cuts = balance_documents(lengths, padded_length // sp_size, sp_size, cost)
    return _runs(cuts, window, document, lengths, padded_length)


def balance_documents(
    lengths: np.ndarray, local_length: int, sp_size: int, cost: CostModel
) -> np.ndarray:
    """Cut documents of ``lengths`` (n,) among ranks of ``local_length`` rows: int64 (4, m).

    Columns of :class:`Cuts`; what the documents leave free is document n, the padding.
    """
    best, best_seconds = None, np.inf
    for slack in SLACKS:
        dealer = _Dealer(lengths, local_length, sp_size, cost, slack)
        if best is not None and dealer.num_long == 0:
            break  # without long documents the cap decides nothing
        cuts = dealer.deal()
        seconds = modelled_seconds(cuts, len(lengths), local_length, sp_size, cost).max()
        if seconds < best_seconds:
            best, best_seconds = cuts, seconds
    assert best is not None
    return best


def modelled_seconds(
    cuts: np.ndarray, num_documents: int, local_length: int, sp_size: int, cost: CostModel
) -> np.ndarray:
    """Modelled seconds of every rank, float64 (P,), of documents cut as ``cuts`` (4, m)."""
    document, start, stop, rank = cuts[:, cuts[0] < num_documents]
    pairs, rows, peers = traffic(document, start, stop, rank, sp_size)
    return cost.rank_seconds(local_length, pairs, rows, peers)


def traffic(
    document: np.ndarray, start: np.ndarray, stop: np.ndarray, rank: np.ndarray, sp_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per rank, each (P,): pairs, key rows (larger of received and sent), peers (likewise).

    Every rank receives each row it needs once from its owner, as ``gather`` does: the minimum.
    """
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
    return pairs, np.maximum(received, sent), peers


class _Dealer:
    """One attempt: the documents still to place and the room left on every rank."""

    def __init__(
        self,
        lengths: np.ndarray,
        local_length: int,
        sp_size: int,
        cost: CostModel,
        slack: float,
    ) -> None:
        self.order = np.argsort(-lengths, kind="stable")
        self.lengths, self.padding = lengths, sp_size * local_length - int(lengths.sum())
        n = lengths[self.order].astype(np.float64)
        work = n * (n + 1) / 2
        mean = float(work.sum()) / sp_size
        linear = local_length * cost.seconds_per_token / cost.seconds_per_pair
        cap = mean + slack * (mean + linear)
        # Of the documents from each one on, padding included: tokens, work, density.
        self.rest_tokens = np.cumsum(np.r_[self.padding, n[::-1]])[::-1]
        self.rest_work = np.cumsum(np.r_[0.0, work[::-1]])[::-1]
        sigma = self.rest_work / np.maximum(self.rest_tokens, 1)
        density = (n + 1) / 2
        room = cap - local_length * sigma[:-1]
        long = (n * (density - sigma[:-1]) > room) | (
            (n > local_length) & (density > mean / local_length)
        )
        self.num_long = int(np.argmin(long)) if not long.all() else len(n)
        self.sigma = float(sigma[self.num_long])
        self.free = np.full(sp_size, local_length, dtype=np.int64)
        self.work = np.full(sp_size, cap)
        self.cuts = Cuts()

    def deal(self) -> np.ndarray:
        """Run the three stages; int64 (4, m) as in :class:`Cuts`."""
        self._deal_long()
        placed = min(len(self.order), self.num_long + MOST_PLACED)
        self._place(self.order[self.num_long : placed])
        self._pour(np.sort(self.order[placed:]))
        return self.cuts.array()

    def _deal_long(self) -> None:
        free, work = self.free.tolist(), self.work.tolist()
        rank, last_rank = 0, len(free) - 1
        least = 0.02 * (work[0] - free[0] * self.sigma)
        for document in self.order[: self.num_long].tolist():
            start, stop = 0, int(self.lengths[document])
            density = (stop + 1) / 2
            while start < stop:
                excess = work[rank] - free[rank] * self.sigma
                while rank < last_rank and (excess <= least or not free[rank]):
                    rank += 1
                    excess = work[rank] - free[rank] * self.sigma
                if not free[rank]:
                    break
                share = min(stop - start, free[rank])
                if density > self.sigma and rank < last_rank:
                    share = min(share, max(1, round(excess / (density - self.sigma))))
                if stop - start - share < BLOCK and stop - start <= free[rank]:
                    share = stop - start
                front, back = _front_and_back(start, stop, share, free[rank])
                self.cuts.add(document, start, front, rank)
                self.cuts.add(document, back, stop, rank)
                free[rank] -= front - start + stop - back
                work[rank] -= _pairs(start, front) + _pairs(back, stop)
                start, stop = front, back
            if start < stop:
                # Rounding left the last rank full: the innermost tokens go wherever there is room.
                for other in sorted(range(len(free)), key=lambda r: -free[r]):
                    part = min(free[other], stop - start)
                    self.cuts.add(document, start, start + part, other)
                    free[other] -= part
                    work[other] -= _pairs(start, start + part)
                    start += part
        self.free = np.array(free, dtype=np.int64)
        self.work = np.array(work)

    def _place(self, documents: np.ndarray) -> None:
        free, work = self.free, self.work
        tokens, pairs = float(self.rest_tokens[self.num_long]), float(self.rest_work[self.num_long])
        waiting = [(-int(self.lengths[d]), d, 0, int(self.lengths[d])) for d in documents.tolist()]
        heapq.heapify(waiting)
        while waiting:
            _, document, start, stop = heapq.heappop(waiting)
            size = stop - start
            mean = (pairs - _pairs(start, stop)) / max(tokens - size, 1)
            excess = work - free * mean
            excess[free < size] = -np.inf
            rank = int(excess.argmax())
            if free[rank] < size:
                rank = int(free.argmax())
                part = int(free[rank])
                wanted = work[rank] / part
                if 2 * wanted > start + stop:
                    begin, end = stop - part, stop
                    left = (start, begin)
                else:
                    begin, end = start, start + part
                    left = (end, stop)
                heapq.heappush(waiting, (left[0] - left[1], document, *left))
            else:
                begin, end = start, stop
            self.cuts.add(document, begin, end, rank)
            done = _pairs(begin, end)
            free[rank] -= end - begin
            work[rank] -= done
            tokens, pairs = tokens - (end - begin), pairs - done

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


def _front_and_back(start: int, stop: int, share: int, most: int) -> tuple[int, int]:
    """Where the two halves of a share of ``[start, stop)`` end: near blocks, at most ``most``."""
    if share == stop - start:
        return stop, stop
    front, back = start + share // 2, stop - (share - share // 2)
    if share < 8 * BLOCK:
        return front, back
    near = (front + BLOCK // 2) // BLOCK * BLOCK
    if share == most:  # equal tokens come first: the back gives what the front takes
        return near, back + near - front
    far = (back + BLOCK // 2) // BLOCK * BLOCK
    return (near, far) if near - start + stop - far <= most else (front, back)


def _runs(
    cuts: np.ndarray,
    window: Window,
    segment_document: np.ndarray,
    lengths: np.ndarray,
    padded_length: int,
) -> np.ndarray:
    """From stretches of documents to runs of tokens: a document may lie in several segments."""
    edges = window.cu_seqlens
    order = np.argsort(segment_document, kind="stable")
    # All documents one behind the other, each in token order, the padding last.
    token = np.r_[edges[:-1][order], window.num_tokens]
    size = np.r_[np.diff(edges)[order], padded_length - window.num_tokens]
    place = np.cumsum(size) - size
    document, start, _, rank = cuts
    begin = start + np.r_[0, np.cumsum(lengths)][document]
    by_place = np.argsort(begin)
    begin, rank = begin[by_place], rank[by_place]
    cut = np.unique(np.r_[begin, place[size > 0]])
    segment = np.searchsorted(place, cut, side="right") - 1
    first = token[segment] + cut - place[segment]
    runs = np.stack(
        [
            first,
            first + np.diff(np.r_[cut, padded_length]),
            rank[np.searchsorted(begin, cut, side="right") - 1],
        ],
        axis=1,
    ).astype(np.int64)
    return join_runs(runs[np.lexsort((runs[:, 0], runs[:, 2]))])
