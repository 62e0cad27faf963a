"""The coarse mask equals the dense one, block by block, without ever being dense."""

import time
import tracemalloc

import numpy as np
import pytest

from anchorcontext.modes import MODES, PADDING, visible
from anchorcontext.watch.mask_grid import mask_grid

RANDOM = np.random.default_rng(0)
DOC_IDS = {
    "one token": np.array([0]),
    "anchor and documents": np.repeat(np.arange(5), [1, 7, 13, 5, 23]),
    "no anchor document": np.repeat(np.arange(3), [9, 20, 8]),
    "all of one token": np.arange(40),
    "interleaved": np.r_[0, RANDOM.integers(1, 6, 70)],
    "padded": np.r_[np.repeat(np.arange(3), [1, 15, 9]), np.full(6, PADDING)],
}


@pytest.mark.parametrize("num_blocks", [1, 2, 7, 16, 100])
@pytest.mark.parametrize("doc_ids", DOC_IDS.values(), ids=DOC_IDS.keys())
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_every_block_counts_the_dense_mask(mode, doc_ids, num_blocks):
    grid = mask_grid(mode, doc_ids, num_blocks)
    dense = visible(mode, doc_ids).astype(np.int64)
    edges = grid.edges[:-1]
    counted = np.add.reduceat(np.add.reduceat(dense, edges, axis=0), edges, axis=1)
    np.testing.assert_array_equal(grid.pairs, counted)
    assert grid.edges[0] == 0 and grid.edges[-1] == len(doc_ids)
    assert len(edges) <= max(num_blocks, 2)


def test_the_anchor_is_a_block_of_its_own_and_wholly_visible():
    doc_ids = np.repeat(np.arange(3), [1, 500, 499])
    grid = mask_grid(MODES["anchor"], doc_ids, 20)
    assert grid.edges[1] == 1
    np.testing.assert_array_equal(grid.fraction[:, 0], 1.0)
    assert grid.fraction[-1, 2] == 0.0


def test_full_attention_is_all_that_causality_allows():
    fraction = mask_grid(MODES["full"], np.zeros(1000, dtype=np.int64), 30).fraction
    np.testing.assert_array_equal(fraction, np.tril(np.ones((30, 30))))


def test_a_128k_window_takes_a_moment_and_no_square_array():
    lengths = np.diff(np.r_[1, np.sort(RANDOM.choice(131071, 149, replace=False)) + 1, 131072])
    doc_ids = np.repeat(np.arange(151), np.r_[1, lengths])
    tracemalloc.start()
    started = time.perf_counter()
    grid = mask_grid(MODES["anchor"], doc_ids, 768)
    seconds, peak = time.perf_counter() - started, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert grid.pairs.sum() == (lengths * (lengths + 1) // 2).sum() + 131072
    assert peak < 64 * 2**20  # the mask itself would be 16 GiB
    assert seconds < 5
