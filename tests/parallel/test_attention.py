"""The proof matrix: distributed attention against a dense oracle, fp64, forward and backward.

Every exchange x layout x mode x number of ranks x document set x head count, to 1e-10 relative.
Windows of equal length make one micro-batch, so that each is padded as if it were alone, and one
start of the ranks serves all micro-batches. Each rank compares the rows it holds with an oracle
that was computed once, before the ranks started. A failure names its case.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anchorcontext.testing import run_distributed

MODES = ("full", "intra_doc", "intra_doc_reset", "anchor")
LAYOUTS = ("contiguous", "zigzag", "balanced")
HEADS = ((9, 3), (8, 2), (4, 1))
HEAD_DIM, SCALE = 8, 0.3
TOLERANCE = 1e-10
RANKS = (1, 2, 3, 4, 5, 8)
TEAMS = ((4, 2), (8, 4))  # ranks and those of a team, which swap heads: 2 x 2 and 2 x 4


def random_documents(seed, total):
    """Lengths that add up to ``total``, about every third document of one token."""
    rng = np.random.default_rng(seed)
    lengths = []
    while sum(lengths) < total:
        wanted = 1 if rng.random() < 0.35 else int(rng.integers(2, 20))
        lengths.append(min(wanted, total - sum(lengths)))
    return tuple(lengths)


DOCUMENTS = (
    (7, 13, 5, 23, 16),  # hazard 10
    (8, 8, 8, 8),  # hazard 11: boundaries on, before and behind the ranks' edges
    (4, 12, 16),
    (7, 1, 17, 7),
    (1, 30, 1),
    (9, 23),
    (1,) * 32,
    (9, 8, 8, 12, 8, 12),  # hazard 12: shards that are partly or all padding
    (7, 8, 5, 11),  # hazard 16
    (31,),  # hazard 18: lengths that do not divide
    (5,),
    (2, 1),  # fewer tokens than ranks: shards without any
    (1,),
    *(random_documents(seed, total) for seed, total in enumerate((64, 64, 57, 31))),
)


class Case(NamedTuple):
    """One micro-batch under one plan; its windows are (document lengths, mode)."""

    windows: tuple[tuple[tuple[int, ...], str], ...]
    layout: str
    exchange: str
    ulysses: int = 1
    engine: str = "cpu"
    exact: bool = False


def micro_batches():
    """Every document set in every mode, windows of equal length together; then all of them."""
    by_length = defaultdict(list)
    for mode in MODES:
        for lengths in DOCUMENTS:
            batch = by_length[sum(lengths) + (mode == "anchor")]
            # To mode full all documents are one.
            if mode != "full" or mode not in {mode for _, mode in batch}:
                batch.append((lengths, mode))
    ragged = [
        (lengths, MODES[number % len(MODES)]) for number, lengths in enumerate(DOCUMENTS[::-1])
    ]
    return [tuple(batch) for batch in (*by_length.values(), ragged)]


def cases(exchange, ulysses=1, layouts=LAYOUTS, **options):
    return [
        Case(batch, layout, exchange, ulysses, **options)
        for batch in micro_batches()
        for layout in layouts
    ]


def fitting_heads(ulysses):
    return [
        (heads, kv_heads)
        for heads, kv_heads in HEADS
        if heads % ulysses == 0 and (kv_heads % ulysses == 0 or ulysses % kv_heads == 0)
    ]


def oracle_of(lengths, mode, heads, seed=0):
    """(2, 2 Hq + 2 Hkv, L, D): q, k, v, dout over out, dq, dk, dv, side by side."""
    from anchorcontext.testing.oracle import dense_attention, dense_mask

    window = make_window(lengths, mode)
    counts = head_counts(heads)
    shape = (sum(counts), window.num_tokens, HEAD_DIM)
    generator = torch.Generator().manual_seed(seed)
    given = torch.randn(shape, generator=generator, dtype=torch.float64)
    q, k, v, dout = (x.clone().requires_grad_() for x in given.split(counts))
    if mode == "anchor":  # one that matters: a wrong count shows
        for x in (k, v):
            x.data[:, 0] *= 5
    out = dense_attention(q, k, v, dense_mask(window.doc_ids.tolist(), mode), SCALE)
    out.backward(dout.detach())
    given, expected = (q, k, v, dout), (out, q.grad, k.grad, v.grad)
    # Results lie as the inputs do: out has the heads of dout, dq those of q.
    return torch.stack([torch.cat(given), torch.cat([expected[i] for i in (1, 2, 3, 0)])]).detach()


def make_window(lengths, mode):
    """The documents, behind an anchor token in mode anchor."""
    from anchorcontext import Window

    documents = [np.arange(1, n + 1) for n in lengths]
    return Window.from_documents(documents, anchor_id=0 if mode == "anchor" else None, mode=mode)


def head_counts(heads):
    """Of q, k, v and dout."""
    return [heads[0], heads[1], heads[1], heads[0]]


def prove(world, oracle_path, cases):
    """All cases on fresh ranks, with time for a busy machine."""
    run_distributed(check_cases, world, oracle_path, cases, timeout=280, group_timeout=60)


def check_cases(rank, world, oracle_path, cases):
    """Every case on this group under every head count."""
    # Our own file; reading it as untrusted takes half a second a rank.
    oracle = torch.load(oracle_path, mmap=True, weights_only=False)
    for case in cases:
        try:
            check_case(rank, oracle, case)
        except Exception as error:
            raise AssertionError(f"{error}\n{world} ranks, {case}") from error


def check_case(rank, oracle, case):
    import torch.distributed as dist

    from anchorcontext import distributed_attention, make_plan

    windows = [make_window(lengths, mode) for lengths, mode in case.windows]
    plan = make_plan(
        windows,
        dist.group.WORLD,
        case.layout,
        case.exchange,
        ulysses=case.ulysses,
        engine=case.engine,
        exact=case.exact,
        verify=False,
    )
    held = [plan.data.local_indices(rank, number) for number in range(len(windows))]
    rows = (torch.arange(len(windows))[:, None], torch.from_numpy(np.stack(held)))
    for heads in fitting_heads(case.ulysses):
        counts = head_counts(heads)
        # Padding holds what is seen if it is not masked, and wants zeros.
        given = torch.full((len(windows), plan.padded_length, sum(counts), HEAD_DIM), 3.0).double()
        wanted = torch.zeros_like(given)
        for number, window in enumerate(case.windows):
            whole = oracle[(*window, heads)].transpose(1, 2)
            given[number, : whole.shape[1]], wanted[number, : whole.shape[1]] = whole
        q, k, v, dout = given[rows].transpose(1, 2).split(counts, dim=1)
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = distributed_attention(q, k, v, plan, scale=SCALE)
        out.backward(dout)

        found = torch.cat([q.grad, k.grad, v.grad, out.detach()], dim=1).transpose(1, 2)
        error = (found - wanted[rows]).abs().amax((1, 3)).split(counts, dim=1)
        largest = wanted.abs().amax((1, 3)).split(counts, dim=1)
        for name, off, scale in zip(("dq", "dk", "dv", "out"), error, largest, strict=True):
            relative = off.amax(1) / scale.amax(1).masked_fill(scale.amax(1) == 0, 1)
            worst = int(relative.nan_to_num(torch.inf).argmax())
            assert relative[worst] <= TOLERANCE, (
                f"{name} of window {worst}, {case.windows[worst]}, with heads {heads} is off by "
                f"{relative[worst]:.1e} relative on rank {rank}"
            )
    check_traffic(plan, case)


def check_traffic(plan, case):
    """What was counted is what the plan says: bytes, and messages, of which none is empty."""
    every = fitting_heads(case.ulysses)
    planned = [
        plan.predicted_bytes(
            num_layers=1,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=HEAD_DIM,
            dtype=torch.float64,
        )
        for heads, kv_heads in every
    ]
    assert plan.meter.bytes_sent == sum(planned), "bytes sent are those of the plan"
    anchors = plan.mine.anchors.broadcast
    messages = 2 * len(anchors.sends) + len(anchors.receives)
    for step in plan.mine.steps:
        messages += 2 * len(step.incoming.sends) + len(step.returns.sends)
        for message in (*step.incoming.sends, *step.returns.sends):
            assert message.rows.num_rows > 0, "a step that nobody needs sends nothing"
    messages += 4 * (case.ulysses - 1)  # heads swapped in and out, forward and backward
    assert plan.meter.messages_sent == messages * len(every), "messages are those of the plan"


def write_oracle(path, windows):
    """A file of what the ranks are to find, for (documents, mode) under every head count."""
    every = [(*window, heads) for window in set(windows) for heads in HEADS]
    torch.save({key: oracle_of(*key) for key in every}, path)
    return path


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """The file of all windows of the matrix."""
    windows = [window for batch in micro_batches() for window in batch]
    return write_oracle(tmp_path_factory.mktemp("oracle") / "matrix.pt", windows)


@pytest.mark.parametrize("world", RANKS)
@pytest.mark.parametrize("exchange", ["ring", "gather"])
def test_rows_travel_between_ranks(oracle, exchange, world):
    layouts = LAYOUTS if world > 1 else LAYOUTS[:1]
    prove(world, oracle, cases(exchange, layouts=layouts))


@pytest.mark.parametrize("world", [n for n in RANKS if n > 1 and fitting_heads(n)])
def test_ulysses_swaps_heads_and_sums_replicated_key_heads(oracle, world):
    """Hazard 21: key/value heads fewer than ranks are replicated, their gradients summed.

    One team holds all tokens: there is nothing to lay out.
    """
    prove(world, oracle, cases("ulysses", world, layouts=["auto"]))


@pytest.mark.parametrize(("world", "ulysses"), TEAMS)
def test_hybrid_swaps_heads_in_a_team_and_rows_between_teams(oracle, world, ulysses):
    gather = cases("gather", ulysses, layouts=["balanced"])
    prove(world, oracle, cases("hybrid", ulysses) + gather)


def test_the_reference_engine(oracle):
    prove(3, oracle, cases("ring", layouts=["zigzag"], engine="reference"))


@pytest.mark.parametrize(("world", "ulysses"), [(3, 1), (4, 2)])
def test_gather_in_its_exact_setting(oracle, world, ulysses):
    every = cases("gather", ulysses, layouts=["balanced"], exact=True)
    prove(world, oracle, every)


def count_messages(rank, world, lengths, exchange):
    """Messages and bytes of one forward and backward in mode intra_doc, contiguous."""
    import torch.distributed as dist

    from anchorcontext import distributed_attention, make_plan

    plan = make_plan(make_window(lengths, "intra_doc"), dist.group.WORLD, "contiguous", exchange)
    q, k, v = torch.randn(3, 1, 2, plan.local_length, HEAD_DIM).requires_grad_()
    distributed_attention(q, k, v, plan).sum().backward()
    return plan.meter.messages_sent, plan.meter.bytes_sent


@pytest.mark.parametrize("exchange", ["ring", "gather"])
def test_what_nobody_needs_is_not_sent(exchange):
    row = 2 * 2 * HEAD_DIM * 4  # key and value of 2 heads, fp32
    assert run_distributed(count_messages, 4, (8, 8, 8, 8), exchange) == [(0, 0)] * 4
    # One document over ranks 0 and 1: its 8 rows go there, again in backward, and come back once.
    crossing = run_distributed(count_messages, 4, (16, 8, 8), exchange)
    assert crossing == [(2, 2 * 8 * row), (1, 8 * row), (0, 0), (0, 0)]


random_windows = st.tuples(
    st.lists(st.integers(1, 20), min_size=1, max_size=6).map(tuple), st.sampled_from(MODES)
)


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(
    batch=st.lists(random_windows, min_size=1, max_size=4).map(tuple),
    layout=st.sampled_from(LAYOUTS),
)
@pytest.mark.parametrize("world", [2, 3])
def test_random_micro_batches(tmp_path_factory, world, batch, layout):
    """The same through hypothesis, which shrinks what fails."""
    path = write_oracle(tmp_path_factory.mktemp("oracle") / "random.pt", batch)
    both = [Case(batch, layout, exchange) for exchange in ("ring", "gather")]
    prove(world, path, both)
