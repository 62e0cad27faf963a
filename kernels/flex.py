"""FlexAttention over tile lists: torch's compiled kernels with a block mask made from the plan.

FlexAttention takes a function ``mask(query, key) -> bool`` and a sparse list of 128 x 128 blocks in
which it has to be asked (torch.nn.attention.flex_attention; arXiv 2412.05496). Both come from the
tile list once and serve all layers, forward and backward: row i of the queries sees the union of at
most m intervals of keys, ``lo[t, i] <= j < hi[t, i]``, m the most tiles any row has; blocks are
found on the host from the tiles' corners, so nothing of size N x M is ever made. An anchor is one
more key behind the others, seen by the queries of its tile.

The kernels are compiled once for each bucket of (N, M, m): rows are padded to the next of eight
sizes an octave, m to a power of two. torch.compile would give a function up after eight of them and
FlexAttention then hold every score of the window, so that limit is lifted for its calls.

**Backward.** FlexAttention differentiates its own (out_A, lse_A), while the rest of attention
needs the gradients of the tiles A under the merged (out, lse). With ``w = exp(lse_A - lse)``, the
share of A in each row, ``out = sum_A w out_A``, and the cotangents of A's results are::

    d out_A = w dO        d lse_A = w dO . (out_A - out)

so the tiles are attended to once more under autograd and pulled back along these.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from .anchored import AnchorKeys
from .interface import SoftmaxState, Tiles
from .merge import merge_
from .pinned import to_device

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
_STEPS_PER_OCTAVE = 8
_COMPILED_SHAPES = 1 << 16


@dataclass(frozen=True, eq=False)
class FlexMask:
    """A tile list as FlexAttention takes it, for N queries and M keys, padded."""

    block_mask: BlockMask
    num_queries: int
    num_keys: int


class FlexEngine:
    """FlexAttention, compiled; see `Engine` for the methods' contract."""

    name = "flex"
    exact = False
    takes_anchors = True
    takes_rotation = False

    @classmethod
    def why_not(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why this engine cannot serve ``device`` and ``dtype``; None when it can."""
        if device.type != "cuda":
            return f"FlexAttention returns an LSE and gradients on cuda only, not on {device.type}"
        if not torch.cuda.is_available():
            return f"torch {torch.__version__} sees no CUDA device"
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"it takes fp32, bf16 and fp16, not {dtype}"
        return None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tiles: Tiles,
        scale: float,
        state: SoftmaxState,
        anchors: AnchorKeys | None = None,
    ) -> None:
        """Merge the tiles' attention, and the anchors', into ``state``, in place."""
        mask = flex_mask(tiles, len(q), len(k), q.device, anchors)
        if mask is None:
            return
        with torch.no_grad():
            out, lse = self._attend(q, *_with_anchors(k, v, anchors), mask, scale)
        merge_(state, 0, len(q), out, lse)

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
        anchors: AnchorKeys | None = None,
        d_anchors: torch.Tensor | None = None,
    ) -> None:
        """Add the gradients into ``dq``, ``dk`` and ``dv``, the anchors' into ``d_anchors``."""
        mask = flex_mask(tiles, len(q), len(k), q.device, anchors)
        if mask is None:
            return
        k_all, v_all = _with_anchors(k, v, anchors)
        leaf_q, leaf_k, leaf_v = (x.detach().requires_grad_() for x in (q, k_all, v_all))
        with torch.enable_grad():
            out_part, lse_part = self._attend(leaf_q, leaf_k, leaf_v, mask, scale)
        with torch.no_grad():
            # A row that saw nothing here, or nothing at all, has no share.
            share = torch.exp(lse_part - lse).masked_fill((lse_part == -math.inf), 0).unsqueeze(-1)
            d_out = share * dout
            d_lse = (d_out * (out_part - out)).sum(-1)
        cotangents = (d_out.to(out_part.dtype), d_lse.to(lse_part.dtype))
        leaves = (leaf_q, leaf_k, leaf_v)
        grads = torch.autograd.grad((out_part, lse_part), leaves, cotangents)
        dq += grads[0]
        for total, grad in zip((dk, dv), grads[1:], strict=True):
            total += grad[: len(k)]
        if anchors is not None:
            assert d_anchors is not None
            d_anchors += torch.stack([grad[len(k) :] for grad in grads[1:]], dim=1)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: FlexMask, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out (N, Hq, D) and lse (N, Hq) of q (N, Hq, D), k and v (M, Hkv, D); differentiable."""
        import torch._dynamo.config as dynamo_config
        from torch.nn.attention.flex_attention import AuxRequest

        padded = (mask.num_queries, mask.num_keys, mask.num_keys)
        q_heads, k_heads, v_heads = (
            torch.nn.functional.pad(x, (0, 0, 0, 0, 0, rows - len(x))).transpose(0, 1)[None]
            for x, rows in zip((q, k, v), padded, strict=True)
        )
        with dynamo_config.patch(
            recompile_limit=_COMPILED_SHAPES, accumulated_recompile_limit=_COMPILED_SHAPES
        ):
            out, aux = _compiled()(
                q_heads,
                k_heads,
                v_heads,
                block_mask=mask.block_mask,
                scale=scale,
                enable_gqa=True,
                return_aux=AuxRequest(lse=True),
            )
        return out[0].transpose(0, 1)[: len(q)], aux.lse[0].t()[: len(q)]


def flex_mask(
    tiles: Tiles,
    num_queries: int,
    num_keys: int,
    device: torch.device,
    anchors: AnchorKeys | None = None,
) -> FlexMask | None:
    """The mask of ``tiles``, and of the anchors as keys behind the others; None when it is empty.

    Made once per tile list, size, device and rows that see an anchor.
    """
    seen = None if anchors is None else (len(anchors.rows), anchors.queries.tobytes())
    cache_key = ("flex", device, num_queries, num_keys, seen)
    if cache_key not in tiles.cache:
        array, total_keys = tiles.array, num_keys
        if anchors is not None:
            array = np.concatenate([array, _anchor_tiles(anchors, num_keys)])
            total_keys += len(anchors.rows)
        made = _make(array, bucket(num_queries), bucket(total_keys), device) if len(array) else None
        tiles.cache[cache_key] = made
    return tiles.cache[cache_key]


def bucket(rows: int) -> int:
    """The padded size of ``rows``: a multiple of `BLOCK`, one of eight between powers of 2."""
    octave = 1 << max(rows - 1, 1).bit_length() - 1
    step = max(BLOCK, octave // _STEPS_PER_OCTAVE)
    return -(-max(rows, 1) // step) * step


def _make(array: np.ndarray, num_queries: int, num_keys: int, device: torch.device) -> FlexMask:
    from torch.nn.attention.flex_attention import BlockMask

    bounds = to_device(torch.from_numpy(_intervals(array, num_queries)), device)
    seen, full = _blocks(array, num_queries, num_keys)
    count, order, full_count, full_order = (
        to_device(torch.from_numpy(x), device)
        for blocks in (seen & ~full, full)
        for x in _ordered(blocks)
    )
    block_mask = BlockMask.from_kv_blocks(
        count,
        order,
        full_count,
        full_order,
        BLOCK_SIZE=BLOCK,
        mask_mod=_mask_mod(bounds),
        seq_lengths=(num_queries, num_keys),
    )
    return FlexMask(block_mask, num_queries, num_keys)


def _mask_mod(bounds: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Whether a query sees a key; ``bounds`` int32 (2, m, N)."""
    # One-dimensional outside of the function: the kernel then indexes what it is given.
    low, high = (side.unbind() for side in bounds)

    def visible(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        inside = (low[0][query] <= key) & (key < high[0][query])
        for part in range(1, len(low)):
            inside = inside | ((low[part][query] <= key) & (key < high[part][query]))
        return inside

    return visible


def _intervals(array: np.ndarray, num_queries: int) -> np.ndarray:
    """int32 (2, m, N): first key and the one after the last of a row's t-th tile; 0, 0 for none."""
    held = np.zeros(num_queries, dtype=np.int64)
    np.add.at(held, array[:, 0], 1)
    stops = array[array[:, 1] < num_queries, 1]
    np.add.at(held, stops, -1)
    most = int(np.cumsum(held).max())
    bounds = np.zeros((2, 1 << (most - 1).bit_length(), num_queries), dtype=np.int32)
    used = np.zeros(num_queries, dtype=np.int64)
    for q_start, q_stop, k_start, k_stop, causal in array.tolist():
        rows = np.arange(q_start, q_stop)
        place = used[q_start:q_stop]
        bounds[0, place, rows] = k_start
        bounds[1, place, rows] = k_stop - (q_stop - 1 - rows) if causal else k_stop
        used[q_start:q_stop] += 1
    return bounds


def _blocks(array: np.ndarray, num_queries: int, num_keys: int) -> tuple[np.ndarray, np.ndarray]:
    """bool (query blocks, key blocks) twice: some pair is visible; one tile shows them all."""
    shape = num_queries // BLOCK, num_keys // BLOCK
    seen, full = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
    for q_start, q_stop, k_start, k_stop, causal in array.tolist():
        for block in range(q_start // BLOCK, (q_stop - 1) // BLOCK + 1):
            first, stop = max(q_start, block * BLOCK), min(q_stop, (block + 1) * BLOCK)
            least = k_stop - (q_stop - 1 - first) if causal else k_stop
            most = k_stop - (q_stop - stop) if causal else k_stop
            seen[block, k_start // BLOCK : -(-most // BLOCK)] = True
            if stop - first == BLOCK:
                full[block, -(-k_start // BLOCK) : least // BLOCK] = True
    return seen, full


def _ordered(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int32 (1, 1, query blocks) counts and (1, 1, query blocks, key blocks) the listed blocks
    first, as BlockMask stores them."""
    count = blocks.sum(1).astype(np.int32)
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return count[None, None], order[None, None]


def _anchor_tiles(anchors: AnchorKeys, num_keys: int) -> np.ndarray:
    number, start, stop = anchors.queries.T
    key = num_keys + number
    return np.stack([start, stop, key, key + 1, np.zeros_like(key)], axis=1)


def _with_anchors(
    k: torch.Tensor, v: torch.Tensor, anchors: AnchorKeys | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if anchors is None:
        return k, v
    return torch.cat([k, anchors.rows[:, 0]]), torch.cat([v, anchors.rows[:, 1]])


@functools.cache
def _compiled() -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    # A part that cannot be compiled is an error: uncompiled, FlexAttention is dense.
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)
