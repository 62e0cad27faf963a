"""From a tile list to the CPU operator's calls.

A tile becomes a full rectangle, or a rectangle and a causal square (the operator's mask is aligned
top-left); small ones of equal shape share a call, as a batch.

**Exact tile lists.** The operator's rounding of a row depends on the shape of its call alone: it
cuts queries and keys into blocks by their numbers. For `Tiles.exact` a document is therefore cut at
fixed places of its own, `EXACT_EDGES`, and every block is computed in full: once against all keys
before it, once against itself. A rank that holds only some rows of a block computes it too, with
stand-ins for the rows it lacks, and drops their results. So a row meets the same calls, in the same
order, on however many ranks its document lies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from .interface import Tiles

# Tiles of up to 256 x 256 are batched: above, the fixed cost of a call is below 5 % of its work
# (1.9 ms for 256 x 256, 8 heads of 64, fp32, one thread).
# 4096 rows a batch bound the gathered copies to a few MiB.
BATCHED_TILE_ROWS = 256
BATCH_ROWS = 4096

# Where exact tile lists cut a document: blocks grow with the position, so that a short document
# (where `cpu_short` does not take it) fills most of its last block; from 1024 rows on the operator
# is as fast as in one call.
EXACT_EDGES = (0, 64, 128, 256, 512, 1024)
EXACT_BLOCK = 1024


@dataclass(frozen=True)
class Rows:
    """The packed rows of one call: ``len(starts)`` runs of ``length`` rows.

    ``bounds``, one (first, stop) a run, are given where runs reach over rows that are not there;
    a row at the bound stands in for them.
    """

    starts: tuple[int, ...]
    length: int
    bounds: tuple[tuple[int, int], ...] | None = None

    @property
    def start(self) -> int:
        return self.starts[0]

    @property
    def stop(self) -> int:
        return self.start + len(self.starts) * self.length

    @cached_property
    def index(self) -> torch.Tensor | None:
        """int64 row numbers; None when the runs lie end to end, as ``start:stop``."""
        if self.bounds is not None:
            first, stop = torch.tensor(self.bounds).T[:, :, None]
            return self._numbers.clamp(first, stop - 1).flatten()
        if self.starts == tuple(range(self.start, self.stop, self.length)):
            return None
        return self._numbers.flatten()

    @cached_property
    def held(self) -> torch.Tensor | None:
        """int64: which of the loaded rows are there, where some are not."""
        if self.bounds is None:
            return None
        first, stop = torch.tensor(self.bounds).T[:, :, None]
        there = (self._numbers >= first) & (self._numbers < stop)
        return there.flatten().nonzero().squeeze(1)

    @property
    def _numbers(self) -> torch.Tensor:
        return torch.tensor(self.starts)[:, None] + torch.arange(self.length)

    def load(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of ``x`` (N, H, ...) as (B, H, length, ...), a view where the index is None."""
        rows = x[self.start : self.stop] if self.index is None else x.index_select(0, self.index)
        return rows.unflatten(0, (len(self.starts), self.length)).transpose(1, 2)

    def unload(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse: (B, H, length, ...) as (B * length, H, ...)."""
        return x.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True)
class Call:
    """One operator call: tiles of equal shape whose query rows are disjoint."""

    queries: Rows
    keys: Rows
    causal: bool


def calls(tiles: Tiles) -> list[Call]:
    """The operator calls that compute ``tiles``; made once per tile list."""
    if "cpu" not in tiles.cache:
        tiles.cache["cpu"] = list(_make(tiles))
    return tiles.cache["cpu"]


def _make(tiles: Tiles) -> Iterator[Call]:
    small: dict[tuple[int, int, bool], list[tuple[int, int]]] = defaultdict(list)
    for q_start, num_queries, k_start, num_keys, causal in _top_left(tiles):
        if max(num_queries, num_keys) <= BATCHED_TILE_ROWS:
            small[num_queries, num_keys, causal].append((q_start, k_start))
        else:
            yield Call(Rows((q_start,), num_queries), Rows((k_start,), num_keys), causal)
    for (num_queries, num_keys, causal), starts in small.items():
        limit = max(1, BATCH_ROWS // max(num_queries, num_keys))
        for batch in _disjoint_batches(starts, num_queries, limit):
            q_starts, k_starts = zip(*batch, strict=True)
            yield Call(Rows(q_starts, num_queries), Rows(k_starts, num_keys), causal)


def exact_calls(tiles: Tiles) -> list[Call]:
    """The operator calls that compute an exact tile list; made once per list."""
    if "cpu exact" not in tiles.cache:
        tiles.cache["cpu exact"] = list(_make_exact(tiles))
    return tiles.cache["cpu exact"]


def _make_exact(tiles: Tiles) -> Iterator[Call]:
    """First every block against the keys before it, then every block against itself: in one order
    for every row, whatever else is in the list."""
    past: dict[tuple[int, int], list[_Block]] = defaultdict(list)
    present: dict[tuple[int, int], list[_Block]] = defaultdict(list)
    for q_start, q_stop, k_start, k_stop, _ in tiles.array.tolist():
        position = (k_stop - k_start) - (q_stop - q_start)  # of the first query in its document
        for first, stop in _exact_blocks(position, k_stop - k_start):
            q_block, k_block = q_start + first - position, k_start + first
            queries, keys = (q_block, q_start, q_stop), (k_block, k_start, k_stop)
            if first:
                past[stop - first, first].append((queries, (k_start, k_start, k_stop)))
            present[stop - first, stop - first].append((queries, keys))
    for blocks, causal in ((past, False), (present, True)):
        for (num_queries, num_keys), members in blocks.items():
            limit = max(1, BATCH_ROWS // max(num_queries, num_keys))
            for at in range(0, len(members), limit):
                queries, keys = zip(*members[at : at + limit], strict=True)
                yield Call(_bounded(queries, num_queries), _bounded(keys, num_keys), causal)


# Queries and keys of a block, each (first row of the block, first and stop of the rows there are).
_Span = tuple[int, int, int]
_Block = tuple[_Span, _Span]


def _exact_blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The blocks (first, stop) of a document that hold one of its positions ``start .. stop-1``."""
    edges = [*EXACT_EDGES, *range(EXACT_EDGES[-1] + EXACT_BLOCK, stop + EXACT_BLOCK, EXACT_BLOCK)]
    for first, end in pairwise(edges):
        if first < stop and end > start:
            yield first, end


def _bounded(spans: Sequence[_Span], length: int) -> Rows:
    starts, firsts, stops = zip(*spans, strict=True)
    bounds = tuple(zip(firsts, stops, strict=True))
    inside = all(start >= first and start + length <= stop for start, first, stop in spans)
    return Rows(starts, length, None if inside else bounds)


def _top_left(tiles: Tiles) -> Iterator[tuple[int, int, int, int, bool]]:
    """Tiles as (q_start, num_queries, k_start, num_keys, causal) with every causal one square."""
    for q_start, q_stop, k_start, k_stop, causal in tiles.array.tolist():
        num_queries, num_keys = q_stop - q_start, k_stop - k_start
        before = num_keys - num_queries if causal else num_keys
        if before:
            yield q_start, num_queries, k_start, before, False
        if causal:
            yield q_start, num_queries, k_start + before, num_queries, num_queries > 1


def _disjoint_batches(
    starts: list[tuple[int, int]], num_queries: int, limit: int
) -> Iterator[list[tuple[int, int]]]:
    """Batches of at most ``limit`` tiles; within one, no two tiles share a query row.

    A merge writes each row once, so tiles over the same rows must come one after the other.
    """
    waiting = sorted(starts)
    while waiting:
        batch: list[tuple[int, int]] = []
        later: list[tuple[int, int]] = []
        free = 0
        for tile in waiting:
            if tile[0] >= free and len(batch) < limit:
                batch.append(tile)
                free = tile[0] + num_queries
            else:
                later.append(tile)
        yield batch
        waiting = later
