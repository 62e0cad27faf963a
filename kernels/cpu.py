"""The CPU engine: torch's flash attention operator for CPUs, called tile by tile.

The operator (``aten::_scaled_dot_product_flash_attention_for_cpu``) takes (B, H, S, D) views of any
stride, reads key heads natively under GQA, returns the LSE and never holds a score matrix. Three
of its habits shape this file:

* its causal mask is aligned top-left, ours bottom-right: a causal tile with more keys than queries
  is computed as a full rectangle and a causal square, which agree on both alignments;
* a call costs about 0.1 ms before it computes anything: small tiles of equal shape go into one call
  as a batch, which gives each of them the result of its own call, bit for bit;
* its bf16 backward adds dq, dk and dv up in bf16, so that their error grows with the square root
  of the length (dk: 0.4 % at 1K, 0.7 % at 4K), and takes from 4x (documents of 64 tokens) to 0.75x
  (8K tokens) the time of fp32: the backward always runs in fp32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from .interface import SoftmaxState, Tiles, accumulator_dtype
from .merge import lse_for_backward, merge_, merge_rows_

_FORWARD_OP = "_scaled_dot_product_flash_attention_for_cpu"
_BACKWARD_OP = "_scaled_dot_product_flash_attention_for_cpu_backward"
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# Tiles of up to 256 x 256 are batched: above, the fixed cost of a call is below 5 % of its work
# (1.9 ms for 256 x 256, 8 heads of 64, fp32, one thread).
# 4096 rows a batch bound the gathered copies to a few MiB.
BATCHED_TILE_ROWS = 256
BATCH_ROWS = 4096


class CpuEngine:
    """Flash attention on the CPU; see `Engine` for the two methods' contract."""

    name = "cpu"

    @classmethod
    def why_not(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why this engine cannot serve ``device`` and ``dtype``; None when it can."""
        if device.type != "cpu":
            return f"it runs on cpu tensors, not on {device.type}"
        if dtype not in _DTYPES:
            return f"its operator takes fp64, fp32, bf16 and fp16, not {dtype}"
        if not (hasattr(torch.ops.aten, _FORWARD_OP) and hasattr(torch.ops.aten, _BACKWARD_OP)):
            return f"torch {torch.__version__} lacks aten::{_FORWARD_OP}"
        return None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tiles: Tiles,
        scale: float,
        state: SoftmaxState,
    ) -> None:
        """Merge the tiles' attention into ``state``, in place."""
        operator = getattr(torch.ops.aten, _FORWARD_OP)
        for call in _calls(tiles):
            out, lse = operator(
                call.queries.load(q),
                call.keys.load(k),
                call.keys.load(v),
                0.0,
                call.causal,
                scale=scale,
            )
            out, lse = call.queries.unload(out), call.queries.unload(lse)
            if call.queries.index is None:
                merge_(state, call.queries.start, call.queries.stop, out, lse)
            else:
                merge_rows_(state, call.queries.index, out, lse)

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
        """Add the tiles' gradients into ``dq``, ``dk`` and ``dv``, in place."""
        operator = getattr(torch.ops.aten, _BACKWARD_OP)
        dtype = accumulator_dtype(q.dtype)
        lse = lse_for_backward(lse).to(dtype)
        for call in _calls(tiles):
            queries, keys = call.queries, call.keys
            grads = operator(
                queries.load(dout).to(dtype),
                queries.load(q).to(dtype),
                keys.load(k).to(dtype),
                keys.load(v).to(dtype),
                queries.load(out).to(dtype),
                queries.load(lse),
                0.0,
                call.causal,
                scale=scale,
            )
            for total, grad, rows in zip((dq, dk, dv), grads, (queries, keys, keys), strict=True):
                if rows.index is None:
                    total[rows.start : rows.stop] += rows.unload(grad)
                else:
                    total.index_add_(0, rows.index, rows.unload(grad))


@dataclass(frozen=True)
class _Rows:
    """The packed rows of one call: ``len(starts)`` runs of ``length`` rows."""

    starts: tuple[int, ...]
    length: int

    @property
    def start(self) -> int:
        return self.starts[0]

    @property
    def stop(self) -> int:
        return self.start + len(self.starts) * self.length

    @cached_property
    def index(self) -> torch.Tensor | None:
        """int64 row numbers; None when the runs lie end to end, as ``start:stop``."""
        if self.starts == tuple(range(self.start, self.stop, self.length)):
            return None
        return (torch.tensor(self.starts)[:, None] + torch.arange(self.length)).flatten()

    def load(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of ``x`` (N, H, ...) as (B, H, length, ...), a view where the index is None."""
        rows = x[self.start : self.stop] if self.index is None else x.index_select(0, self.index)
        return rows.unflatten(0, (len(self.starts), self.length)).transpose(1, 2)

    def unload(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse: (B, H, length, ...) as (B * length, H, ...)."""
        return x.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True)
class _Call:
    """One operator call: tiles of equal shape whose query rows are disjoint."""

    queries: _Rows
    keys: _Rows
    causal: bool


def _calls(tiles: Tiles) -> list[_Call]:
    """The operator calls that compute ``tiles``; made once per tile list."""
    if "cpu" not in tiles.cache:
        tiles.cache["cpu"] = list(_make_calls(tiles))
    return tiles.cache["cpu"]


def _make_calls(tiles: Tiles) -> Iterator[_Call]:
    small: dict[tuple[int, int, bool], list[tuple[int, int]]] = defaultdict(list)
    for q_start, num_queries, k_start, num_keys, causal in _top_left(tiles):
        if max(num_queries, num_keys) <= BATCHED_TILE_ROWS:
            small[num_queries, num_keys, causal].append((q_start, k_start))
        else:
            yield _Call(_Rows((q_start,), num_queries), _Rows((k_start,), num_keys), causal)
    for (num_queries, num_keys, causal), starts in small.items():
        limit = max(1, BATCH_ROWS // max(num_queries, num_keys))
        for batch in _disjoint_batches(starts, num_queries, limit):
            q_starts, k_starts = zip(*batch, strict=True)
            yield _Call(_Rows(q_starts, num_queries), _Rows(k_starts, num_keys), causal)


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
