"""What every engine computes: attention over a list of tiles on one device.

Shapes use the packed, token-major form of variable-length attention:

* ``N`` query rows, ``M`` key rows (all windows of a micro-batch, one after the other);
* ``Hq`` query heads, ``Hkv`` key/value heads, ``Hq`` a multiple of ``Hkv``; query head ``h``
  reads key head ``h // (Hq // Hkv)``;
* ``D`` the head dimension.

Accumulators are fp32 (fp64 for fp64 inputs) whatever the dtype of q, k and v.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

TILE_COLUMNS = ("q_start", "q_stop", "k_start", "k_stop", "causal")


@dataclass(frozen=True, eq=False)
class Tiles:
    """A tile list: rectangles of (query rows) x (key rows) that one engine call computes.

    ``array`` is int64 of shape (T, 5), columns ``q_start, q_stop, k_start, k_stop, causal``; rows
    index the packed query and key tensors of the call. A tile is either *full* (every query row
    sees every key row) or *causal*, aligned bottom-right: query row ``q_stop - 1 - i`` sees the key
    rows before ``k_stop - i``, so ``k_stop - k_start >= q_stop - q_start``. No tile is empty. Two
    tiles may share query rows (their results are merged) but never the same (query, key) pair.

    ``exact`` asks that the result of a row in ``forward`` has the same bits whichever other rows
    share the call, so that ranks that hold parts of a document give what one device gives. All
    keys of a query row are then in one causal tile that starts with the first key of its document.

    Compared by identity: an engine may cache on the object what it derives from it (index tensors
    on the device, block masks) in ``cache``.
    """

    array: np.ndarray
    exact: bool = False
    cache: dict = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        array = np.ascontiguousarray(self.array, dtype=np.int64).reshape(-1, len(TILE_COLUMNS))
        queries, keys = array[:, 1] - array[:, 0], array[:, 3] - array[:, 2]
        assert (array >= 0).all(), "tile rows are never negative"
        assert (queries > 0).all() and (keys > 0).all(), "a tile is never empty"
        assert ((array[:, 4] == 0) | (keys >= queries)).all(), "a causal tile has a key per query"
        assert not self.exact or (array[:, 4] == 1).all(), "an exact tile is causal"
        array.setflags(write=False)
        object.__setattr__(self, "array", array)

    def __len__(self) -> int:
        return len(self.array)

    @property
    def num_pairs(self) -> int:
        """Number of visible (query, key) pairs: the attention work of the list."""
        a = self.array
        queries, keys = a[:, 1] - a[:, 0], a[:, 3] - a[:, 2]
        hidden = np.where(a[:, 4] == 1, queries * (queries - 1) // 2, 0)
        return int((queries * keys - hidden).sum())


@dataclass
class SoftmaxState:
    """The running result of attention: normalised output and log-sum-exp, merged tile by tile.

    ``out`` (N, Hq, D) and ``lse`` (N, Hq), both in the accumulator dtype. A row that has seen no
    key has ``out = 0`` and ``lse = -inf``.
    """

    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def empty(cls, q: torch.Tensor) -> SoftmaxState:
        """The state of queries ``q`` (N, Hq, D) before any key was seen."""
        dtype = accumulator_dtype(q.dtype)
        return cls(
            out=torch.zeros(q.shape, dtype=dtype, device=q.device),
            lse=torch.full(q.shape[:2], float("-inf"), dtype=dtype, device=q.device),
        )


class Engine(Protocol):
    """Computes a tile list on one device. Engines hold no state between calls.

    An engine may compute the anchors in the same call: see :mod:`.anchored`.
    """

    name: str
    exact: bool
    """Whether forward can serve tile lists that are ``exact``."""
    takes_anchors: bool
    """Whether both methods take anchors along (:mod:`.anchored`)."""
    takes_rotation: bool
    """Whether both methods take queries and keys unrotated, with a `Rotation`."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tiles: Tiles,
        scale: float,
        state: SoftmaxState,
    ) -> None:
        """Merge the tiles' attention into ``state``, in place.

        ``q`` (N, Hq, D), ``k`` and ``v`` (M, Hkv, D); the last dimension is contiguous, rows may be
        strided. ``scale`` multiplies the dot products.
        """

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        tiles: Tiles,
        scale: float,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
    ) -> None:
        """Add the tiles' gradients into ``dq`` (N, Hq, D), ``dk`` and ``dv`` (M, Hkv, D), in place.

        ``out`` (N, Hq, D) and ``lse`` (N, Hq) are the *final, merged* result over all tiles, all
        steps and the anchor; the three gradients are accumulators (fp32, fp64 for fp64 inputs).
        """


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64 inputs, fp32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32
