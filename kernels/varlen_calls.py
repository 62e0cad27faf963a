"""From a tile list to calls of a variable-length attention function.

Such a function takes sequences packed end to end, sequence i of queries against sequence i of keys.
Tiles become the sequences of as few calls as possible: a call is all full or all causal, and no two
of its tiles share a query row (a merge writes each row once) or a key row (the gradients of a key
row are added once, so that no sum depends on the order of threads). Rows that lie end to end are
passed as a view, others are gathered.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from .interface import Tiles
from .pinned import to_device


@dataclass(frozen=True, eq=False)
class Sequences:
    """One side of a call: the packed rows of its tiles, in the order of its sequences."""

    start: int
    stop: int
    index: torch.Tensor | None
    """int64 row numbers on the device; None where the rows are ``start:stop``."""
    cu_seqlens: torch.Tensor
    """int32 (n + 1,) on the device."""
    longest: int
    """Rows of the longest sequence."""

    @classmethod
    def of(cls, starts: np.ndarray, stops: np.ndarray, device: torch.device) -> Sequences:
        """The rows ``starts[i]:stops[i]``, one sequence behind the other."""
        sizes = stops - starts
        cu_seqlens = np.concatenate([[0], np.cumsum(sizes)])
        index = None
        if (starts[1:] != stops[:-1]).any():
            rows = np.arange(cu_seqlens[-1]) + np.repeat(starts - cu_seqlens[:-1], sizes)
            index = to_device(torch.from_numpy(rows), device)
        return cls(
            start=int(starts[0]),
            stop=int(stops[-1]),
            index=index,
            cu_seqlens=to_device(torch.from_numpy(cu_seqlens.astype(np.int32)), device),
            longest=int(sizes.max()),
        )

    def load(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of ``x``; a view where the index is None."""
        return x[self.start : self.stop] if self.index is None else x.index_select(0, self.index)

    def add_(self, total: torch.Tensor, values: torch.Tensor) -> None:
        """``total[rows] += values`` in the dtype of ``total``, in place."""
        if self.index is None:
            total[self.start : self.stop] += values
        else:
            total.index_add_(0, self.index, values.to(total.dtype))


@dataclass(frozen=True, eq=False)
class VarlenCall:
    """Tiles whose query rows are disjoint, and whose key rows are."""

    queries: Sequences
    keys: Sequences
    causal: bool


def varlen_calls(tiles: Tiles, device: torch.device) -> list[VarlenCall]:
    """The calls that compute ``tiles``; made once per tile list and device."""
    key = ("varlen", device)
    if key not in tiles.cache:
        tiles.cache[key] = [
            VarlenCall(
                Sequences.of(group[:, 0], group[:, 1], device),
                Sequences.of(group[:, 2], group[:, 3], device),
                bool(group[0, 4]),
            )
            for group in _groups(tiles.array)
        ]
    return tiles.cache[key]


def _groups(tiles: np.ndarray) -> Iterator[np.ndarray]:
    """Tiles that go into one call, in the order of their query rows."""
    for causal in (0, 1):
        waiting = tiles[tiles[:, 4] == causal]
        waiting = waiting[np.argsort(waiting[:, 0], kind="stable")]
        while len(waiting):
            taken = _disjoint(waiting)
            yield waiting[taken]
            waiting = waiting[~taken]


def _disjoint(tiles: np.ndarray) -> np.ndarray:
    """bool (n,): tiles, first come, first served, that share no query row and no key row."""
    taken = np.zeros(len(tiles), dtype=bool)
    free_query = 0
    key_starts: list[int] = []
    key_stops: list[int] = []
    for number, (q_start, q_stop, k_start, k_stop, _) in enumerate(tiles.tolist()):
        place = bisect.bisect(key_starts, k_start)
        shares_keys = (place > 0 and key_stops[place - 1] > k_start) or (
            place < len(key_starts) and key_starts[place] < k_stop
        )
        if q_start >= free_query and not shares_keys:
            taken[number] = True
            free_query = q_stop
            key_starts.insert(place, k_start)
            key_stops.insert(place, k_stop)
    return taken
