"""The plan as data: all ranks simulated in one process, over random windows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anchorcontext.errors import UserError
from anchorcontext.plan import BatchPlan
from anchorcontext.plan.layout import layout_runs, padded_length
from anchorcontext.plan.ring import ring_rows
from anchorcontext.plan.runs import local_indices
from anchorcontext.testing.oracle import dense_mask
from anchorcontext.testing.simulation import simulate
from anchorcontext.window import Window

MODES = ("full", "intra_doc", "intra_doc_reset", "anchor")
LAYOUTS = ("contiguous", "zigzag", "balanced")
FAST = settings(deadline=None, derandomize=True, database=None)


def window_of(lengths, mode):
    documents = [np.arange(n) + 1 for n in lengths]
    return Window.from_documents(documents, 0 if mode == "anchor" else None, mode)


@st.composite
def windows(draw):
    """A window of any mode; in half of them documents lie in several pieces."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=8))
    docs = list(range(1, len(lengths) + 1))
    if draw(st.booleans()):
        docs = [draw(st.integers(1, len(lengths))) for _ in lengths]
    mode = draw(st.sampled_from(MODES))
    if mode == "anchor":
        lengths, docs = [1, *lengths], [0, *docs]
    edges = np.cumsum([0, *lengths])
    return Window(np.arange(edges[-1]), edges, mode, segment_docs=docs)


@st.composite
def plans(draw, exchanges=("ring", "gather", "exact")):
    """A plan of one to three windows for 1 to 8 ranks, some of which may swap heads."""
    batch = draw(st.lists(windows(), min_size=1, max_size=3))
    sp_size = draw(st.integers(1, 8))
    ulysses = draw(st.sampled_from([n for n in range(1, sp_size + 1) if sp_size % n == 0]))
    layout, exchange = draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(exchanges))
    if exchange == "exact":
        return BatchPlan(batch, sp_size, layout, "gather", ulysses, exact=True)
    return BatchPlan(batch, sp_size, layout, exchange, ulysses)


def visible(plan):
    """bool (T, T): query i sees key j, over all windows of the micro-batch, padding included."""
    seen = np.zeros((plan.batch_size * plan.padded_length,) * 2, dtype=bool)
    for number, window in enumerate(plan.windows):
        mask = dense_mask(window.doc_ids.tolist(), window.mode.name).numpy()
        block = slice(number * plan.padded_length, number * plan.padded_length + len(mask))
        seen[block, block] = mask
    return seen


def readers(plan):
    """bool (teams, T), int (T,): the teams with a query that sees a key; the key's own team."""
    owner = np.zeros(plan.batch_size * plan.padded_length, dtype=int)
    for rank in range(plan.sp_size):
        for number in range(plan.batch_size):
            tokens = plan.local_indices(rank, number) + number * plan.padded_length
            owner[tokens] = rank // plan.ulysses
    seen = visible(plan)
    return np.stack([seen[owner == team].any(0) for team in range(plan.num_teams)]), owner


@settings(FAST, max_examples=1000)
@given(plans(), st.integers(0, 2**32 - 1))
def test_every_visible_pair_is_computed_once_and_its_gradient_comes_home(plan, seed):
    """By exactly one rank, and no other pair is; sends match receives, no message is empty."""
    weights = np.random.default_rng(seed).integers(1, 1 << 30, plan.batch_size * plan.padded_length)
    done, expected = simulate(plan, weights), visible(plan)
    np.testing.assert_array_equal(done.pairs, expected)
    np.testing.assert_array_equal(done.gradients, weights @ expected)
    ranks = [plan.rank(team * plan.ulysses) for team in range(plan.num_teams)]
    assert sum(rank.num_pairs for rank in ranks) == expected.sum()
    assert [rank.forward_rows_sent for rank in ranks] == done.sent.tolist()


@settings(FAST, max_examples=300)
@given(plans(["gather", "exact"]))
def test_gather_receives_the_minimum(plan):
    """Each row that some query of a rank sees and the rank does not own, once: per document the
    rows before its last query, and the anchor."""
    reads, owner = readers(plan)
    foreign = owner != np.arange(plan.num_teams)[:, None]
    done = simulate(plan, np.zeros(len(owner), dtype=int))
    assert done.received.tolist() == (reads & foreign).sum(1).tolist()


@settings(FAST, max_examples=300)
@given(plans(["ring"]))
def test_a_row_goes_round_the_ring_as_far_as_its_farthest_reader(plan):
    """Every rank on the way sends it once. The anchor goes straight to each reader. Gradients come
    straight back from each reader."""
    reads, owner = readers(plan)
    teams = np.arange(plan.num_teams)
    sent, returned = np.zeros(plan.num_teams, dtype=int), np.zeros(plan.num_teams, dtype=int)
    hops = 0
    anchors = {n * plan.padded_length for n, w in enumerate(plan.windows) if w.mode.anchor}
    for token, home in enumerate(owner.tolist()):
        foreign = teams[reads[:, token] & (teams != home)]
        returned[foreign] += 1
        if token in anchors:
            sent[home] += len(foreign)
            continue
        farthest = max((foreign - home) % plan.num_teams, default=0)
        sent[(home + np.arange(farthest)) % plan.num_teams] += 1
        hops += farthest
    ranks = [plan.rank(team * plan.ulysses) for team in teams.tolist()]
    assert [rank.forward_rows_sent for rank in ranks] == sent.tolist()
    assert [rank.return_rows_sent for rank in ranks] == returned.tolist()
    assert ring_rows(plan.pieces, plan.need) == hops


def test_documents_that_lie_on_one_rank_cost_one_anchor_row():
    window = window_of([15, 16, 16, 16], "anchor")
    plan = BatchPlan([window], 4, "contiguous")
    assert [plan.rank(rank).forward_rows_sent for rank in range(4)] == [3, 0, 0, 0]
    assert [plan.rank(rank).return_rows_sent for rank in range(4)] == [0, 1, 1, 1]
    assert all(len(plan.rank(rank).steps) == 1 for rank in range(4))


def test_full_mode_on_a_zigzag_layout_is_the_classic_ring():
    plan = BatchPlan([window_of([64], "full")], 4, "zigzag", "ring")
    # Three hops of two chunks of 8 rows, less the last chunk: it is nobody's past, so rank 0's
    # share never leaves it, and ranks 0, 1 and 2 each have one hop of 8 rows less.
    assert [plan.rank(rank).forward_rows_sent for rank in range(4)] == [40, 40, 40, 48]
    pairs = [plan.rank(rank).num_pairs for rank in range(4)]
    assert max(pairs) == min(pairs)


@pytest.mark.parametrize("sp_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_gives_every_token_to_one_rank(layout, sp_size):
    for length in (1, 5, 30, 64):
        padded = padded_length(length, layout, sp_size)
        assert length <= padded < length + 2 * sp_size
        runs = layout_runs(layout, window_of([length], "intra_doc"), padded, sp_size)
        shards = [local_indices(runs, rank) for rank in range(sp_size)]
        assert {len(shard) for shard in shards} == {padded // sp_size}
        assert sorted(np.concatenate(shards).tolist()) == list(range(padded))


def test_unknown_names_are_refused_with_the_nearest_known_one():
    window = window_of([4], "full")
    with pytest.raises(UserError, match="did you mean 'zigzag'"):
        BatchPlan([window], 2, "zig-zag")
    with pytest.raises(UserError, match=r"exchange 'rings'.*did you mean 'ring'"):
        BatchPlan([window], 2, "zigzag", "rings")
    with pytest.raises(UserError, match="at least one window"):
        BatchPlan([], 2)


def test_auto_gathers_documents_and_rings_a_full_window():
    """Gather where a rank needs at most the two shards that a ring would hold, else ring."""
    lengths = [20] * 13
    assert BatchPlan([window_of(lengths, "anchor")], 8).exchange == "gather"
    assert BatchPlan([window_of(lengths, "full")], 8).exchange == "ring"
    assert BatchPlan([window_of(lengths, "full")], 2).exchange == "gather"
    assert BatchPlan([window_of(lengths, "full")], 8, ulysses=4).exchange == "gather"
    assert BatchPlan([window_of(lengths, "anchor")], 8, exchange="ring").exchange == "ring"
