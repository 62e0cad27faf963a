"""Work lists cover exactly the visible pairs of their tile list, from both sides, in few steps."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anchorcontext.kernels import Tiles
from anchorcontext.kernels.worklist import anchor_work, key_work, query_work


def covered(work, num_own, num_other) -> torch.Tensor:
    """int64 (own, other): how often a program computes each pair; walks as the kernels do."""
    count = torch.zeros(num_own, num_other, dtype=torch.int64)
    for first, item_start, item_stop, _ in work.blocks.tolist():
        own = torch.arange(first, min(first + work.block_rows, num_own))
        for item in range(item_start, item_stop):
            start, full_start, full_stop, stop = work.items[item].tolist()
            low, high = torch.from_numpy(work.limits[item])[:, : len(own), None]
            assert (full_start - start) % work.step == (full_stop - full_start) % work.step == 0
            count[own, full_start:full_stop] += 1
            other = torch.arange(start, stop)
            edge = (other < full_start) | (other >= full_stop)
            seen = (other >= low) & (other < high)
            assert bool(seen[:, ~edge].all()), "the part without a mask is seen by every row"
            count[own[:, None], other] += (seen & edge).long()
    return count


def check(tiles, visible, block_rows, step) -> None:
    num_queries, num_keys = visible.shape
    tiles = Tiles(tiles)
    by_query = query_work(tiles, num_queries, block_rows, step)
    by_key = key_work(tiles, num_keys, block_rows, step)
    assert torch.equal(covered(by_query, num_queries, num_keys), visible.long())
    assert torch.equal(covered(by_key, num_keys, num_queries), visible.T.long())
    for work in (by_query, by_key):
        starts = work.blocks[:, 0].tolist()
        assert len(set(starts)) == len(starts), "a row has one program"


@pytest.mark.parametrize("blocks", [(16, 16), (32, 8), (8, 64)], ids=str)
def test_tile_lists(tile_list, blocks, oracle):
    num_queries, num_keys = (int(np.asarray(tile_list)[:, column].max()) + 2 for column in (1, 3))
    check(tile_list, oracle.visible(tile_list, num_queries, num_keys), *blocks)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_random_tiles(data, oracle):
    cuts = st.sets(st.integers(1, 60), min_size=1, max_size=6)
    q_cuts, k_cuts = ([0, *sorted(data.draw(cuts))] for _ in range(2))
    tiles = [
        (a, b, c, d, kind)
        for a, b in pairwise(q_cuts)
        for c, d in pairwise(k_cuts)
        for kind in [data.draw(st.sampled_from((None, 0, 1) if d - c >= b - a else (None, 0)))]
        if kind is not None
    ]
    tiles = data.draw(st.permutations(tiles)) or [(0, 1, 0, 1, 1)]
    blocks = data.draw(st.sampled_from([(16, 16), (32, 8), (8, 32)]))
    check(tiles, oracle.visible(tiles, 62, 62), *blocks)


def test_rows_of_an_exact_list_walk_in_steps_from_the_first_key_of_their_tile(oracle):
    tiles = Tiles([(0, 30, 5, 60, 1), (30, 34, 60, 64, 1), (40, 75, 64, 130, 1)], exact=True)
    work = query_work(tiles, 80, 16, 8, exact=True)
    seen = oracle.visible(tiles.array, 80, 130)
    assert torch.equal(covered(work, 80, 130), seen.long())
    assert set(work.items[:, 0].tolist()) == {5, 60, 64}
    assert (work.items[:, 1] == work.items[:, 2]).all(), "nothing is computed without a mask"
    for first, item_start, item_stop, _ in work.blocks.tolist():
        for limits in work.limits[item_start:item_stop]:
            rows = first + np.flatnonzero(limits[1] > limits[0])
            assert sum(bool(((a <= rows) & (rows < b)).any()) for a, b, *_ in tiles.array) == 1


def test_small_documents_share_steps():
    """128 documents of 8 tokens: 8 blocks of 128 rows that walk over 128 keys, not 128 walks."""
    tiles = Tiles([(a, a + 8, a, a + 8, 1) for a in range(0, 1024, 8)])
    work = query_work(tiles, 1024, 128, 64)
    assert (len(work), len(work.items), work.num_steps) == (8, 8, 16)


def test_long_documents_are_mostly_computed_without_a_mask():
    work = query_work(Tiles([(0, 4096, 0, 4096, 1)]), 4096, 128, 64)
    full_steps = (work.items[:, 2] - work.items[:, 1]).sum() // 64
    assert full_steps / work.num_steps > 0.9
    assert work.blocks[:, 0].tolist() == list(range(4096 - 128, -1, -128)), "longest first"


def test_anchored_rows_are_listed_without_a_tile():
    anchored = np.zeros(100, dtype=bool)
    anchored[40:41] = True
    work = query_work(Tiles([(0, 8, 0, 8, 1)]), 100, 16, 16, anchored)
    assert sorted(work.blocks[:, 0].tolist()) == [0, 32]
    assert len(query_work(Tiles([]), 100, 16, 16)) == 0


def test_chunks_of_rows_have_one_anchor_and_are_listed_anchor_by_anchor():
    queries = np.array([[1, 3, 20], [0, 20, 25], [1, 30, 31]])
    work = anchor_work(queries, num_anchors=3, num_rows=40, chunk_rows=8)
    assert work.num_chunks == (1, 4, 0)
    assert work.chunks[:, 2].tolist()[:5] == [0, 1, 1, 1, 1]
    rows = np.concatenate([np.arange(a, b) for a, b, *_ in work.chunks.tolist()])
    assert sorted(rows.tolist()) == list(range(40))
    for start, stop, anchor, _ in work.chunks.tolist():
        assert stop - start <= 8 and (work.row_anchor[start:stop] == anchor).all()
