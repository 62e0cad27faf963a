"""The CPU engine's kernel for short tiles, in ``cpu_kernels.c``: which it takes, and its calls.

torch's operator works on blocks of 32 queries and 512 keys and spends most of a short document on
what the mask hides and on its own bookkeeping; over tiles of up to `MAX_ROWS` rows our kernel is
the faster one. It takes fp32 and bf16 and computes all in fp32, probabilities and partial outputs
too. It takes every short tile, whatever rows others share with it, so that the pieces of a short
document on several ranks are computed as exactly as the whole.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from .cpu_library import Matrix, ShortJob, library, rows_of, scratch_of, side_by_side
from .interface import SoftmaxState, Tiles

# A block of 8 query rows holds its scores in 32 KiB of first-level cache up to here.
MAX_ROWS = 1024
# Below this many multiplications a second thread costs more than it saves.
_THREAD_WORK = 1 << 22


class Units(NamedTuple):
    """Tiles and key heads in the order of computation, grouped by what shares rows of a result."""

    array: np.ndarray
    """int64 (U, 2): tile, key head."""
    bounds: np.ndarray
    """int64 (G + 1,): first unit of each group, and U."""
    work: np.ndarray
    """int64 (G,): pairs of a group and all before it."""


@dataclass(frozen=True, eq=False)
class ShortTiles:
    """Tiles of a list that the kernel takes; int64 (T, 5), columns as in `Tiles`."""

    array: np.ndarray
    _units: dict[int, Units] = field(default_factory=dict)

    @property
    def max_keys(self) -> int:
        return int((self.array[:, 3] - self.array[:, 2]).max())

    @cached_property
    def clusters(self) -> np.ndarray:
        """int64 (T,): tiles of different numbers share no query row and no key row."""
        parent = list(range(len(self.array)))

        def root(tile: int) -> int:
            while parent[tile] != tile:
                parent[tile] = tile = parent[parent[tile]]
            return tile

        for start, stop in (self.array[:, :2].T.tolist(), self.array[:, 2:4].T.tolist()):
            reach, farthest = -1, 0
            for tile in np.argsort(start, kind="stable").tolist():
                if start[tile] < reach:
                    parent[root(tile)] = root(farthest)
                if stop[tile] > reach:
                    reach, farthest = stop[tile], tile
        return np.array([root(tile) for tile in range(len(parent))])

    def units(self, num_key_heads: int) -> Units:
        """What threads share out; made once for a number of key heads."""
        if num_key_heads not in self._units:
            tile, head = np.divmod(np.arange(len(self.array) * num_key_heads), num_key_heads)
            cluster = self.clusters[tile]
            order = np.lexsort((tile, head, cluster))
            tile, head, cluster = tile[order], head[order], cluster[order]
            new = (np.diff(cluster) != 0) | (np.diff(head) != 0)
            bounds = np.r_[0, np.flatnonzero(new) + 1, len(tile)]
            a = self.array[tile]
            pairs = np.cumsum((a[:, 1] - a[:, 0]) * (a[:, 3] - a[:, 2]))
            self._units[num_key_heads] = Units(
                np.stack([tile, head], axis=1), bounds, pairs[bounds[1:] - 1]
            )
        return self._units[num_key_heads]


def split(tiles: Tiles) -> tuple[ShortTiles | None, Tiles]:
    """The tiles the kernel takes, and the others; made once per tile list.

    Of exact tiles it takes the first `MAX_ROWS` tokens of every document, however long: the bits of
    a row do not depend on other rows, and on every rank the same rows come here.
    """
    if "cpu short" not in tiles.cache:
        a = _cut(tiles.array) if tiles.exact else tiles.array
        short = (a[:, 1] - a[:, 0] <= MAX_ROWS) & (a[:, 3] - a[:, 2] <= MAX_ROWS)
        taken = ShortTiles(np.ascontiguousarray(a[short])) if short.any() else None
        tiles.cache["cpu short"] = taken, Tiles(a[~short], exact=tiles.exact)
    return tiles.cache["cpu short"]


def _cut(array: np.ndarray) -> np.ndarray:
    """Exact tiles cut behind the first `MAX_ROWS` tokens of their documents."""
    q_start, q_stop, k_start, k_stop, causal = array.T
    position = (k_stop - k_start) - (q_stop - q_start)  # of the first query in its document
    q_cut = np.clip(q_start + MAX_ROWS - position, q_start, q_stop)
    k_cut = np.minimum(k_stop, k_start + MAX_ROWS)
    first = np.stack([q_start, q_cut, k_start, k_cut, causal], axis=1)
    later = np.stack([q_cut, q_stop, k_start, k_stop, causal], axis=1)
    parts = np.concatenate([first, later])
    return parts[parts[:, 0] < parts[:, 1]]


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tiles: ShortTiles,
    scale: float,
    state: SoftmaxState,
) -> None:
    """`Engine.forward` for short tiles."""
    matrices = {"q": q, "k": k, "v": v, "out": state.out}
    _compute("short_forward", tiles, scale, state.lse, matrices, written=("out",))


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    tiles: ShortTiles,
    scale: float,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    """`Engine.backward` for short tiles."""
    matrices = {
        "q": q, "k": k, "v": v, "out": out, "dout": dout, "dq": dq, "dk": dk, "dv": dv
    }  # fmt: skip
    _compute("short_backward", tiles, scale, lse, matrices, written=("dq", "dk", "dv"))


def _compute(
    name: str,
    tiles: ShortTiles,
    scale: float,
    lse: torch.Tensor,
    matrices: dict[str, torch.Tensor],
    written: tuple[str, ...],
) -> None:
    _, num_heads, head_dim = matrices["q"].shape
    num_key_heads = matrices["k"].shape[1]
    units = tiles.units(num_key_heads)
    job = ShortJob(
        **{key: Matrix.of(x, accumulator=key in written) for key, x in matrices.items()},
        **rows_of(lse),
        tiles=tiles.array.ctypes.data,
        units=units.array.ctypes.data,
        num_heads=num_heads,
        num_key_heads=num_key_heads,
        head_dim=head_dim,
        scale=scale,
    )
    lib = library()
    kernel = getattr(lib, name)
    elements = lib.short_scratch_elements(head_dim, tiles.max_keys)

    def run(first: int, last: int) -> None:
        scratch = scratch_of(elements)
        kernel(ctypes.byref(job), first, last, scratch.data_ptr())

    useful = 1 + int(units.work[-1]) * (num_heads // num_key_heads) * head_dim // _THREAD_WORK
    side_by_side(run, equal_shares(units, min(torch.get_num_threads(), useful)))


def equal_shares(units: Units, threads: int) -> list[int]:
    """Cuts between groups that give every thread about the same work: first units, and U."""
    bounds, work = units.bounds, units.work
    wanted = work[-1] * np.arange(1, threads) / threads
    before = np.r_[0, work]
    after = np.searchsorted(before, wanted)
    nearer = np.where(wanted - before[after - 1] < before[after] - wanted, after - 1, after)
    return np.unique(np.r_[0, bounds[nearer], bounds[-1]]).tolist()
