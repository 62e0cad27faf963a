"""The plan as data: simulated rank by rank, every visible pair is computed exactly once."""

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
from anchorcontext.window import Window

MODES = ("full", "intra_doc", "intra_doc_reset", "anchor")
LAYOUTS = ("contiguous", "zigzag", "balanced")


def window_of(lengths, mode):
    documents = [np.arange(n) + 1 for n in lengths]
    return Window.from_documents(documents, 0 if mode == "anchor" else None, mode)


def flat(rows):
    parts = [np.arange(start, stop) for start, stop in rows.intervals]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def tokens_of_rows(plan, rank):
    """Token (in micro-batch coordinates) of each local row."""
    windows = range(plan.batch_size)
    return np.concatenate([plan.local_indices(rank, w) + w * plan.padded_length for w in windows])


def simulate(plan):
    """Run the messages of all ranks on token numbers; returns the buffers per rank and step."""
    held = [tokens_of_rows(plan, rank) for rank in range(plan.sp_size)]
    buffers = [[tokens] for tokens in held]
    for step in range(1, max(len(plan.rank(r).steps) for r in range(plan.sp_size))):
        mail = {}
        for rank in range(plan.sp_size):
            steps = plan.rank(rank).steps
            if step < len(steps):
                for message in steps[step].incoming.sends:
                    assert message.rows.num_rows > 0
                    mail[rank, message.peer] = buffers[rank][step - 1][flat(message.rows)]
        for rank in range(plan.sp_size):
            steps = plan.rank(rank).steps
            if step >= len(steps):
                continue
            buffer = np.full(steps[step].num_rows, -1)
            for message in steps[step].incoming.receives:
                buffer[flat(message.rows)] = mail.pop((message.peer, rank))
            assert (buffer >= 0).all(), "every row of a buffer arrives"
            buffers[rank].append(buffer)
        assert not mail, "what is sent is received"
    return buffers


def pairs_computed(plan):
    """int (T, T): how often each (query, key) pair of the micro-batch is computed."""
    count = np.zeros((plan.batch_size * plan.padded_length,) * 2, dtype=int)
    anchored = [w for w, window in enumerate(plan.windows) if window.mode.anchor]
    buffers = simulate(plan)
    for rank in range(plan.sp_size):
        tokens, mine = tokens_of_rows(plan, rank), plan.rank(rank)
        for step, buffer in zip(mine.steps, buffers[rank], strict=True):
            for q_start, q_stop, k_start, k_stop, causal in step.tiles.array:
                for q in range(q_start, q_stop):
                    stop = k_stop - (q_stop - 1 - q) if causal else k_stop
                    count[tokens[q], buffer[k_start:stop]] += 1
        for anchor, start, stop in mine.anchors.queries:
            count[tokens[start:stop], anchored[anchor] * plan.padded_length] += 1
    return count


def assert_exact(plan):
    count = pairs_computed(plan)
    expected = np.zeros_like(count)
    for w, window in enumerate(plan.windows):
        mask = dense_mask(window.doc_ids.tolist(), window.mode.name).numpy()
        offset, length = w * plan.padded_length, window.num_tokens
        expected[offset : offset + length, offset : offset + length] = mask
    np.testing.assert_array_equal(count, expected)
    assert sum(plan.rank(r).num_pairs for r in range(plan.sp_size)) == expected.sum()


documents = st.lists(st.integers(1, 12), min_size=1, max_size=8)


@settings(max_examples=150, deadline=None)
@given(
    batch=st.lists(documents, min_size=1, max_size=3),
    mode=st.sampled_from(MODES),
    layout=st.sampled_from(LAYOUTS),
    sp_size=st.sampled_from([1, 2, 3, 4, 5, 8]),
)
def test_every_visible_pair_is_computed_exactly_once(batch, mode, layout, sp_size):
    assert_exact(BatchPlan([window_of(d, mode) for d in batch], sp_size, layout, "ring"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_interleaved_documents_see_their_earlier_pieces(mode, layout):
    docs = [0, 1, 2, 1, 3, 2, 1]
    edges = np.cumsum([0, 1, 5, 4, 3, 6, 2, 7])
    window = Window(np.arange(edges[-1]), edges, mode, segment_docs=docs)
    for sp_size in (1, 2, 3, 4):
        assert_exact(BatchPlan([window], sp_size, layout, "ring"))


@settings(max_examples=60, deadline=None)
@given(documents, st.sampled_from(MODES), st.sampled_from(LAYOUTS), st.sampled_from([2, 3, 4, 8]))
def test_needed_rows_are_the_minimum(lengths, mode, layout, sp_size):
    """Per document: rows before the rank's last query that it does not own."""
    plan = BatchPlan([window_of(lengths, mode)], sp_size, layout)
    window = plan.windows[0]
    groups = np.zeros(window.num_tokens) if mode == "full" else window.doc_ids
    for rank in range(sp_size):
        own = set(plan.local_indices(rank, 0).tolist())
        minimum = 0
        for group in np.unique(groups):
            tokens = np.flatnonzero(groups == group)
            queries = [t for t in tokens if t in own]
            if queries:
                minimum += sum(t < max(queries) and t not in own for t in tokens)
        assert (plan.need[rank] * plan.pieces.size).sum() == minimum


@settings(max_examples=60, deadline=None)
@given(documents, st.sampled_from(MODES), st.sampled_from(LAYOUTS), st.sampled_from([2, 3, 4, 8]))
def test_a_row_travels_only_as_far_as_it_is_needed(lengths, mode, layout, sp_size):
    """Each row takes max(distance of the ranks that need it) hops, and comes back once a user."""
    plan = BatchPlan([window_of(lengths, mode)], sp_size, layout, "ring")
    hops = returns = 0
    for piece in range(len(plan.pieces)):
        users = np.flatnonzero(plan.need[:, piece])
        distances = (users - plan.pieces.owner[piece]) % sp_size
        hops += max(distances, default=0) * plan.pieces.size[piece]
        returns += len(users) * plan.pieces.size[piece]
    ranks = [plan.rank(rank) for rank in range(sp_size)]
    assert sum(s.incoming.rows_sent for r in ranks for s in r.steps) == hops
    assert ring_rows(plan.pieces, plan.need) == hops
    assert sum(s.returns.rows_sent for r in ranks for s in r.steps) == returns


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
