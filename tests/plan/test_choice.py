"""``exchange: auto``: its closed forms are the plan's numbers, and its choices have reasons."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from anchorcontext.plan import BatchPlan, CostModel, choice
from anchorcontext.plan.choice import choose_exchange
from anchorcontext.plan.mixes import mix_lengths
from anchorcontext.plan.tiling import tile_counts
from anchorcontext.window import Window

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 16
COST = CostModel.of_layer(
    linear_weights=1e5, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, forwards=2
)
LLAMA3_8B = CostModel(heads=(32, 8))
NVLINK = 450e9


def window_of(lengths, mode, segment_docs=None):
    edges = np.r_[0, np.cumsum(lengths)]
    return Window(np.zeros(edges[-1], dtype=np.int64), edges, mode, segment_docs=segment_docs)


def mix_window(length, mode):
    return window_of([1, *mix_lengths("slimpajama", length - 1, 0)], mode)


def windows_of(mode, seed):
    """Two windows of unequal lengths; a document of the first one lies in two runs."""
    lengths = np.random.default_rng(seed).integers(1, 60, 12)
    docs = [*range(10), 3, 7] if mode == "intra_doc" else None
    return [window_of(lengths, mode, docs), window_of(lengths[3:9], mode)]


def candidates_of(plan, cost=COST):
    token_rows = plan.batch_size * -(-plan.length // plan.sp_size)
    found = choose_exchange(plan.pieces, plan.need, token_rows, cost)
    return {candidate.exchange: candidate for candidate in found.candidates}


def bytes_sent(plan):
    sizes = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "element_size": 2}
    return max(plan.bytes_sent(rank, forwards=2, **sizes) for rank in range(plan.sp_size))


@pytest.mark.parametrize("mode", ["full", "intra_doc"])
@pytest.mark.parametrize("sp_size", [2, 4, 8])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced"])
def test_bytes_and_rows_are_those_of_the_plans(layout, sp_size, mode):
    windows = windows_of(mode, sp_size)
    plans = {
        exchange: BatchPlan(windows, sp_size, layout, exchange)
        for exchange in ("gather", "ring", "ulysses")
    }
    found = candidates_of(plans["gather"])
    assert {name: found[name].bytes_sent for name in plans} == {
        name: bytes_sent(plan) for name, plan in plans.items()
    }
    for name in ("gather", "ring"):
        held = 0
        for rank in range(sp_size):
            steps = [step.num_rows for step in plans[name].rank(rank).steps[1:]] + [0]
            held = max(held, *(a + b for a, b in zip(steps, [*steps[1:], 0], strict=True)))
        assert found[name].rows_held == held


@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize("layout", ["zigzag", "balanced"])
@pytest.mark.parametrize("mode", ["full", "anchor"])
def test_tiles_are_counted_without_making_them(mode, layout, exchange):
    for sp_size in (2, 8):
        plan = BatchPlan([mix_window(16384, mode)] * 2, sp_size, layout, exchange)
        made = [sum(len(s.tiles) for s in plan.rank(rank).steps) for rank in range(sp_size)]
        assert tile_counts(plan.pieces, sp_size, exchange).tolist() == made


def test_seconds_are_those_of_the_steps():
    """By hand from the plan: what travels for a step hides behind the attention before it."""
    cost = replace(COST, seconds_per_message=0, bytes_per_second=2e8, flops_per_second=1e8)
    windows = windows_of("intra_doc", 5)
    for exchange in ("gather", "ring"):
        plan = BatchPlan(windows, 4, "zigzag", exchange)
        slowest = 0.0
        for rank in range(4):
            steps = plan.rank(rank).steps
            exposed = 0.0
            for before, step in pairwise(steps):
                keys = max(step.incoming.rows_received, step.incoming.rows_sent)
                home = max(step.returns.rows_received, step.returns.rows_sent)
                key_bytes = cost.bytes_per_row - cost.gradient_bytes_per_row
                travel = key_bytes * keys + cost.gradient_bytes_per_row * home
                travel /= cost.bytes_per_second
                attention = before.tiles.num_pairs * cost.seconds_per_pair
                exposed += travel - min(cost.hideable * travel, attention)
            pairs = sum(step.tiles.num_pairs for step in steps)
            slowest = max(slowest, exposed + pairs * cost.seconds_per_pair)
        assert candidates_of(plan, cost)[exchange].seconds == pytest.approx(slowest)


def test_packed_documents_are_gathered_and_a_full_window_is_not():
    for sp_size in (4, 8, 16):
        documents = BatchPlan([mix_window(65536, "anchor")], sp_size, cost=LLAMA3_8B)
        assert documents.exchange_name == "gather"
    assert BatchPlan([mix_window(65536, "full")], 8, cost=LLAMA3_8B).exchange_name == "ring"
    fast = replace(LLAMA3_8B, bytes_per_second=NVLINK)
    assert BatchPlan([mix_window(65536, "full")], 8, cost=fast).exchange_name == "ring"


def test_ulysses_where_attention_is_too_short_to_hide_keys():
    """8K tokens on 16 ranks: 24 MB of swaps against 94 MB of keys and gradients."""
    window = mix_window(8192, "full")
    auto = BatchPlan([window], 16, cost=LLAMA3_8B)
    asked = BatchPlan([window], 16, exchange="ulysses", cost=LLAMA3_8B)
    assert auto.exchange_name == "ulysses" and auto.layout == asked.layout == "contiguous"
    assert auto.num_teams == 1 and len(auto.pieces) == len(asked.pieces)
    for rank in (0, 15):
        np.testing.assert_array_equal(auto.local_indices(rank, 0), asked.local_indices(rank, 0))
        assert auto.rank(rank).num_pairs == asked.rank(rank).num_pairs


@pytest.mark.parametrize(
    ("heads", "why"),
    [(None, "heads are not given"), ((9, 3), "9 query and 3 key/value heads do not divide")],
)
def test_without_fitting_heads_ulysses_is_left_out_and_nothing_is_refused(heads, why):
    plan = BatchPlan([mix_window(8192, "full")], 16, cost=replace(LLAMA3_8B, heads=heads))
    assert plan.exchange_name == "ring" and why in plan.choice.reason
    assert {c.exchange for c in plan.choice.candidates} == {"gather", "ring"}


def test_buffers_beyond_the_limit_are_not_chosen():
    window = mix_window(65536, "full")
    narrow = replace(LLAMA3_8B, heads=None, bytes_per_second=NVLINK)
    found = {c.exchange: c for c in BatchPlan([window], 2, cost=narrow).choice.candidates}
    assert found["gather"].buffer_bytes == found["ring"].buffer_bytes
    found = {c.exchange: c for c in BatchPlan([window], 16, cost=LLAMA3_8B).choice.candidates}
    assert found["ulysses"].buffer_bytes < found["ring"].buffer_bytes < found["gather"].buffer_bytes
    for memory, expected in (
        (found["ring"].buffer_bytes, "ring"),
        (1.1e8, "ulysses"),
        (1, "ulysses"),
    ):
        plan = BatchPlan([window], 16, cost=replace(LLAMA3_8B, exchange_memory=memory))
        assert plan.exchange_name == expected
        assert "fits into" in plan.choice.reason
    assert "none fits" in plan.choice.reason


def test_teams_that_swap_heads_already_exchange_rows_by_gather_or_ring():
    plan = BatchPlan([mix_window(8192, "full")], 16, ulysses=4, cost=LLAMA3_8B)
    alone = BatchPlan([mix_window(8192, "full")], 4, cost=LLAMA3_8B)
    assert plan.exchange_name in ("ulysses 4 + gather", "ulysses 4 + ring")
    assert "swapped in teams" in plan.choice.reason
    ours, whole = plan.choice.candidates[0], alone.choice.candidates[0]
    assert ours.bytes_sent == whole.bytes_sent / 4  # 2 of 8 key/value heads a rank


def test_tiles_cost_time_where_the_device_says_so():
    window = mix_window(8192, "anchor")
    cost = replace(LLAMA3_8B, seconds_per_tile=1e-3)
    found = {c.exchange: c for c in BatchPlan([window], 4, cost=cost).choice.candidates}
    documents = len(window.segment_docs)
    assert found["ulysses"].seconds > documents * 1e-3 > found["gather"].seconds


def test_each_choice_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(choice, "_told", set())
    with caplog.at_level(logging.INFO, logger=choice.__name__):
        for _ in range(2):
            BatchPlan([mix_window(4096, "anchor")], 4, cost=LLAMA3_8B)
    (record,) = caplog.records
    text = record.getMessage()
    for part in ("gather: fastest", "ring sends", "ulysses sends", "rows in", "exposes"):
        assert part in text
