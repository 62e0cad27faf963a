"""FlexAttention: the mask made from tiles, and the engine's arithmetic around torch's kernels.

On CPUs FlexAttention computes an output, without LSE or gradients: the mask is checked on it. The
engine around it runs on a dense stand-in for the kernel that needs a GPU.
"""

from __future__ import annotations

import functools
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_mask, flex_attention

from anchorcontext.kernels import SoftmaxState, Tiles, flex, get_engine
from anchorcontext.kernels.anchored import (
    AnchorKeys,
    backward_with_anchors_,
    forward_with_anchors_,
)
from anchorcontext.kernels.flex import BLOCK, FlexEngine, bucket, flex_mask

CPU = torch.device("cpu")
SCALE = 0.3
LONG = [(0, 300, 0, 300, 1), (300, 700, 300, 900, 1), (300, 700, 0, 290, 0), (702, 703, 5, 6, 0)]


def shown(mask):
    """bool (N, M) padded: the pairs that the kernel computes, by the block lists and the mask."""
    blocks = mask.block_mask
    visible = torch.zeros(mask.num_queries, mask.num_keys, dtype=torch.bool)
    asked = create_mask(blocks.mask_mod, 1, 1, mask.num_queries, mask.num_keys, "cpu")[0, 0]
    for counts, indices, whole in (
        (blocks.kv_num_blocks, blocks.kv_indices, False),
        (blocks.full_kv_num_blocks, blocks.full_kv_indices, True),
    ):
        for row, count in enumerate(counts[0, 0].tolist()):
            for column in indices[0, 0, row, :count].tolist():
                cell = (
                    slice(row * BLOCK, (row + 1) * BLOCK),
                    slice(column * BLOCK, (column + 1) * BLOCK),
                )
                visible[cell] = True if whole else asked[cell]
    return visible


class DenseFlex(FlexEngine):
    """The engine with a dense stand-in for the compiled kernel."""

    def _attend(self, q, k, v, mask, scale):
        visible = shown(mask)[: len(q), : len(k)]
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,mhd->qhm", q, k) * scale
        scores = scores.masked_fill(~visible[:, None], -1e300)
        lse = torch.logsumexp(scores, -1)
        probs = torch.exp(scores - lse.unsqueeze(-1)) * visible[:, None]
        lse = lse.masked_fill(~visible.any(1)[:, None], -math.inf)
        return torch.einsum("qhm,mhd->qhd", probs, v), lse


def inputs_for(oracle, tiles, heads, dtype):
    array = np.asarray(tiles)
    return oracle.inputs(array[:, 1].max() + 2, array[:, 3].max() + 2, heads, dtype)


def test_the_mask_shows_exactly_the_tiles(oracle, tile_list):
    check_mask(oracle, tile_list)


def test_the_mask_of_long_tiles_has_full_blocks(oracle):
    mask = check_mask(oracle, LONG)
    assert mask.block_mask.full_kv_num_blocks.sum() == 8


def check_mask(oracle, tiles):
    x = inputs_for(oracle, tiles, (2, 1), torch.float32)
    mask = flex_mask(Tiles(tiles), len(x.q), len(x.k), CPU)
    visible = oracle.visible(tiles, mask.num_queries, mask.num_keys)
    assert torch.equal(shown(mask), visible)
    return mask


def test_torch_computes_the_tiles_under_the_mask(oracle):
    """torch's own FlexAttention as an oracle, over blocks of both kinds, GQA included."""
    x = inputs_for(oracle, LONG, (4, 2), torch.float32)
    tiles = Tiles(LONG)
    mask = flex_mask(tiles, len(x.q), len(x.k), CPU)
    padded = (
        torch.nn.functional.pad(y, (0, 0, 0, 0, 0, rows - len(y))).transpose(0, 1)[None]
        for y, rows in zip(
            (x.q, x.k, x.v), (mask.num_queries, mask.num_keys, mask.num_keys), strict=True
        )
    )
    found = flex_attention(*padded, block_mask=mask.block_mask, scale=SCALE, enable_gqa=True)
    state = SoftmaxState.empty(x.q)
    get_engine("cpu", device=CPU, dtype=torch.float32).forward(x.q, x.k, x.v, tiles, SCALE, state)
    assert (found[0].transpose(0, 1)[: len(x.q)] - state.out).abs().max() < 1e-5


def test_windows_of_one_size_are_compiled_once(oracle):
    """The mask's function is captured whole, and other documents are other numbers to it."""
    counter = CompileCounterWithBackend("eager")
    attend = torch.compile(flex_attention, backend=counter, dynamic=False, fullgraph=True)
    for edges, compiled in (((0, 90, 200), 1), ((0, 13, 200), 1), ((0, 200), 1), ((0, 300), 2)):
        tiles = Tiles([(start, stop, start, stop, 1) for start, stop in pairwise(edges)])
        mask = flex_mask(tiles, edges[-1], edges[-1], CPU)
        q, k = (torch.zeros(1, heads, mask.num_queries, 16) for heads in (4, 2))
        attend(q, k, k, block_mask=mask.block_mask, scale=SCALE, enable_gqa=True)
        assert counter.frame_count == compiled, edges


@pytest.mark.parametrize("heads", [(4, 2), (9, 3)], ids=lambda h: f"{h[0]}q{h[1]}kv")
@pytest.mark.parametrize("with_anchors", [False, True])
def test_forward_and_backward_merge_into_what_is_there(oracle, tile_list, heads, with_anchors):
    """The pull-back along the share of a partial result, against the reference engine."""
    x = inputs_for(oracle, tile_list, heads, torch.float64)
    before = Tiles([(0, len(x.q) - 1, 0, 1, 0)])  # an earlier step: one key that all but one see
    queries = [(0, 0, 3), (1, 5, len(x.q) - 1)] if with_anchors else []
    rows = torch.randn(2, 2, heads[1], x.k.shape[2], dtype=torch.float64)
    anchors = AnchorKeys(rows, np.array(queries, dtype=np.int64).reshape(-1, 3))
    found = []
    for engine in (get_engine("reference", device=CPU, dtype=torch.float64), DenseFlex()):
        tiles, state = Tiles(tile_list), SoftmaxState.empty(x.q)
        none = AnchorKeys(rows[:0], anchors.queries[:0])
        forward_with_anchors_(engine, x.q, x.k, x.v, before, SCALE, state, none)
        forward_with_anchors_(engine, x.q, x.k, x.v, tiles, SCALE, state, anchors)
        sums = [torch.zeros_like(y) for y in (x.q, x.k, x.v, rows)]
        backward_with_anchors_(
            engine,
            *(x.dout, x.q, x.k, x.v, state.out, state.lse, tiles, SCALE, *sums[:3]),
            anchors,
            sums[3],
        )
        found.append((state.out, state.lse, *sums))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a.isfinite(), b.isfinite())
        assert (a - b).nan_to_num(0).abs().max() < 1e-12


def test_every_bucket_is_compiled_once_however_many_there_are(oracle, monkeypatch):
    """Past its limit torch would run FlexAttention uncompiled: dense, without a word."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    flex._compiled.cache_clear()
    torch._dynamo.reset()
    engine, cpu = FlexEngine(), get_engine("cpu", device=CPU, dtype=torch.float32)
    with torch._dynamo.config.patch(recompile_limit=1):
        for tokens in (100, 200, 300, 110):
            half = tokens // 2
            lists = [[(0, tokens, 0, tokens, 1)], [(0, half, 0, half, 1), (half, tokens, 0, 9, 0)]]
            for tiles in map(Tiles, lists):  # other documents, the same compilation
                x = oracle.inputs(tokens, tokens, (2, 1), torch.float32)
                found, expected = SoftmaxState.empty(x.q), SoftmaxState.empty(x.q)
                engine.forward(x.q, x.k, x.v, tiles, SCALE, found)
                cpu.forward(x.q, x.k, x.v, tiles, SCALE, expected)
                torch.testing.assert_close(found.out, expected.out, rtol=0, atol=1e-5)
                torch.testing.assert_close(found.lse, expected.lse, rtol=0, atol=1e-5)
    flex._compiled.cache_clear()
    assert len(compiled) == 3


def test_a_tile_list_serves_different_anchored_rows(oracle):
    tiles, x = Tiles([(0, 4, 0, 4, 1)]), oracle.inputs(8, 8, (1, 1), torch.float32)
    rows = torch.stack([x.k[:2], x.v[:2]], 1)
    masks = [
        flex_mask(tiles, 8, 8, CPU, AnchorKeys(rows, np.array([[number, 4, stop]])))
        for number, stop in ((0, 6), (0, 8), (1, 8))
    ]
    seen = [shown(mask)[:8, 8:10].sum(0).tolist() for mask in masks]
    assert seen == [[2, 0], [4, 0], [0, 4]]


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 1000, 1025, 65536, 65537, 131072])
def test_buckets_are_few_and_near(rows):
    size = bucket(rows)
    assert size % BLOCK == 0 and rows <= size <= max(BLOCK * -(-rows // BLOCK), rows * 9 / 8 + 1)
    assert len({bucket(n) for n in range(65537, 131073, 64)}) == 8


def test_is_refused_on_cpu_with_the_reason():
    assert "cuda only" in FlexEngine.why_not(CPU, torch.bfloat16)
