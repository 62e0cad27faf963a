"""The CPU engine's kernel for short tiles, ``short_tiles.c``: which tiles it takes, and its calls.

torch's operator works on blocks of 32 queries and 512 keys and spends most of a short document on
what the mask hides and on its own bookkeeping; over tiles of up to `MAX_ROWS` rows our kernel is
the faster one. It takes fp32 and bf16 and computes all in fp32, probabilities and partial outputs
too. It takes every short tile, whatever rows others share with it, so that the pieces of a short
document on several ranks are computed as exactly as the whole.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from .compiled import CompilerError, load
from .interface import SoftmaxState, Tiles

logger = logging.getLogger("anchorcontext")

# A block of 8 query rows holds its scores in 32 KiB of first-level cache up to here.
MAX_ROWS = 1024
# Below this many multiplications a second thread costs more than it saves.
_THREAD_WORK = 1 << 22
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


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
    """The tiles the kernel takes, and the others; made once per tile list."""
    if "cpu short" not in tiles.cache:
        a = tiles.array
        short = (a[:, 1] - a[:, 0] <= MAX_ROWS) & (a[:, 3] - a[:, 2] <= MAX_ROWS)
        taken = ShortTiles(np.ascontiguousarray(a[short])) if short.any() else None
        tiles.cache["cpu short"] = taken, Tiles(a[~short])
    return tiles.cache["cpu short"]


def why_not(*tensors: torch.Tensor) -> str | None:
    """Why the kernel cannot serve tensors of these dtypes here; None when it can."""
    for tensor in tensors:
        if tensor.dtype not in _DTYPES:
            return f"it takes fp32 and bf16, not {tensor.dtype}"
    return _missing()


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
    _compute("short_forward", tiles, scale, state.lse, matrices)


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
    _compute("short_backward", tiles, scale, lse, matrices)


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("is_bf16", ctypes.c_int64),
    )


class _Job(ctypes.Structure):
    _fields_ = (
        *((name, _Matrix) for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")),
        ("lse", ctypes.c_void_p),
        ("lse_row_stride", ctypes.c_int64),
        ("lse_head_stride", ctypes.c_int64),
        ("tiles", ctypes.c_void_p),
        ("units", ctypes.c_void_p),
        ("num_heads", ctypes.c_int64),
        ("num_key_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


def _compute(
    name: str,
    tiles: ShortTiles,
    scale: float,
    lse: torch.Tensor,
    matrices: dict[str, torch.Tensor],
) -> None:
    library = _library()
    _, num_heads, head_dim = matrices["q"].shape
    num_key_heads = matrices["k"].shape[1]
    units = tiles.units(num_key_heads)
    job = _Job(
        **{field: _matrix(tensor) for field, tensor in matrices.items()},
        lse=lse.data_ptr(),
        lse_row_stride=lse.stride(0),
        lse_head_stride=lse.stride(1),
        tiles=tiles.array.ctypes.data,
        units=units.array.ctypes.data,
        num_heads=num_heads,
        num_key_heads=num_key_heads,
        head_dim=head_dim,
        scale=scale,
    )
    kernel = getattr(library, name)
    elements = library.scratch_elements(head_dim, tiles.max_keys)

    def run(first: int, last: int) -> None:
        scratch = torch.empty(elements + 16)
        kernel(ctypes.byref(job), first, last, (scratch.data_ptr() + 63) // 64 * 64)

    useful = 1 + int(units.work[-1]) * (num_heads // num_key_heads) * head_dim // _THREAD_WORK
    edges = equal_shares(units, min(torch.get_num_threads(), useful))
    if len(edges) == 2:
        run(*edges)
        return
    # ctypes lets other threads run while a kernel does.
    list(_pool(len(edges) - 1, os.getpid()).map(run, edges[:-1], edges[1:]))


def equal_shares(units: Units, threads: int) -> list[int]:
    """Cuts between groups that give every thread about the same work: first units, and U."""
    bounds, work = units.bounds, units.work
    wanted = work[-1] * np.arange(1, threads) / threads
    before = np.r_[0, work]
    after = np.searchsorted(before, wanted)
    nearer = np.where(wanted - before[after - 1] < before[after] - wanted, after - 1, after)
    return np.unique(np.r_[0, bounds[nearer], bounds[-1]]).tolist()


@functools.cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads of this process: a fork has none of its parent's."""
    return ThreadPoolExecutor(threads, thread_name_prefix="anchorcontext-cpu")


def _matrix(x: torch.Tensor) -> _Matrix:
    assert x.stride(-1) == 1 or x.shape[-1] == 1, "the last dimension is contiguous"
    return _Matrix(x.data_ptr(), x.stride(0), x.stride(1), _DTYPES[x.dtype])


def _library() -> ctypes.CDLL:
    library = load("short_tiles")
    library.scratch_elements.argtypes = (ctypes.c_int64, ctypes.c_int64)
    library.scratch_elements.restype = ctypes.c_int64
    for kernel in (library.short_forward, library.short_backward):
        kernel.argtypes = (
            ctypes.POINTER(_Job), ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p
        )  # fmt: skip
        kernel.restype = None
    return library


@functools.cache
def _missing() -> str | None:
    try:
        _library()
    except CompilerError as error:
        logger.info("short documents on the CPU go through torch's operator: %s", error)
        return str(error)
    return None
