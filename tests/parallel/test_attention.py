"""Distributed attention against a dense oracle: forward and backward, fp64, on gloo ranks."""

from __future__ import annotations

import pytest

from anchorcontext.testing import run_distributed

MODES = ("full", "intra_doc", "intra_doc_reset", "anchor")
LAYOUTS = ("contiguous", "zigzag", "balanced")
EXCHANGES = ("ring", "gather")
# Lengths of documents; hazards 10, 11, 12, 18 and windows shorter than the ranks are many.
DOCUMENTS = (
    (7, 13, 5, 23, 16),
    (8, 8, 8, 8),
    (4, 12, 16),
    (7, 1, 17, 7),
    (1, 30, 1),
    (9, 23),
    (1,) * 32,
    (30,),
    (9, 8, 8, 12, 8, 12),
    (5,),
    (2, 1),
    (1,),
)
TOLERANCE = 1e-10


def make_window(lengths, mode, seed=0):
    """The documents behind an anchor token in mode anchor, without one elsewhere."""
    import numpy as np

    from anchorcontext import Window

    rng = np.random.default_rng(seed)
    documents = [rng.integers(1, 100, size=n) for n in lengths]
    return Window.from_documents(documents, anchor_id=0 if mode == "anchor" else None, mode=mode)


def check_attention(rank, world, cases, heads, engine, ulysses=1):
    """Every case on this group: outputs and gradients, gathered, against the oracle on rank 0."""
    import torch
    import torch.distributed as dist

    from anchorcontext import distributed_attention, make_plan, unshard
    from anchorcontext.testing.oracle import dense_attention, dense_mask

    dtype = torch.float64
    num_heads, num_kv_heads = heads
    head_dim, scale = 8, 0.3
    for batch, mode, layout, exchange in cases:
        windows = [make_window(lengths, mode, seed) for seed, lengths in enumerate(batch)]
        plan = make_plan(
            windows, dist.group.WORLD, layout, exchange, ulysses=ulysses, engine=engine
        )
        torch.manual_seed(1)
        shape = (len(windows), plan.padded_length, head_dim)
        whole = [
            torch.randn(shape[0], count, *shape[1:], dtype=dtype)
            for count in (num_heads, num_kv_heads, num_kv_heads, num_heads)
        ]
        if mode == "anchor":
            for x in whole[1:3]:
                x[:, :, 0] *= 5  # an anchor that matters: a wrong count shows
        rows = [torch.from_numpy(plan.data.local_indices(rank, b)) for b in range(len(windows))]
        q, k, v, dout = (torch.stack([x[b][:, held] for b, held in enumerate(rows)]) for x in whole)
        for x in (q, k, v):
            x.requires_grad_()
        out = distributed_attention(q, k, v, plan, scale=scale)
        out.backward(dout)
        found = [unshard(x.transpose(1, 2), plan) for x in (out, q.grad, k.grad, v.grad)]

        sent = plan.predicted_bytes(
            num_layers=1,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
        )
        name = (rank, world, batch, mode, layout, exchange, ulysses, heads, engine)
        assert plan.meter.bytes_sent == sent, name
        if rank:
            continue
        for b, window in enumerate(windows):
            length = window.num_tokens
            q, k, v, dout = (x[b, :, :length].clone().requires_grad_() for x in whole)
            mask = dense_mask(window.doc_ids.tolist(), mode)
            expected = dense_attention(q, k, v, mask, scale)
            expected.backward(dout.detach())
            for what, got, want in zip(
                ("out", "dq", "dk", "dv"), found, (expected, q.grad, k.grad, v.grad), strict=True
            ):
                error = (got[b, :length].transpose(0, 1) - want).abs().max().item()
                assert error < TOLERANCE, (what, error, *name)


def cases(batches, layouts=LAYOUTS, exchanges=EXCHANGES):
    return [
        (batch, mode, layout, exchange)
        for batch in batches
        for mode in MODES
        for layout in layouts
        for exchange in exchanges
    ]


SINGLE = [(lengths,) for lengths in DOCUMENTS]
FEW = SINGLE[::5]
BATCHES = [((7, 13, 5), (1,) * 11, (30,)), ((3,), (40, 2))]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_mode_layout_and_document_set_equals_the_dense_oracle(world):
    every = cases(SINGLE, LAYOUTS if world > 1 else LAYOUTS[:1], ["ring"])
    every += cases(SINGLE, ["zigzag"], ["gather"]) if world > 1 else []
    run_distributed(check_attention, world, every, (4, 2), "cpu")


@pytest.mark.parametrize("engine", ["reference", "cpu"])
@pytest.mark.parametrize("heads", [(9, 3), (4, 1), (2, 2)], ids=lambda h: f"{h[0]}q{h[1]}kv")
@pytest.mark.parametrize("world", [1, 3])
def test_head_groups_on_every_engine(world, heads, engine):
    run_distributed(check_attention, world, cases(FEW, ["zigzag"]), heads, engine)


@pytest.mark.parametrize("world", [5, 8])
def test_more_ranks_than_documents(world):
    run_distributed(check_attention, world, cases(FEW), (4, 2), "cpu")


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_batch_of_windows_with_documents_and_anchors_of_their_own(world):
    run_distributed(check_attention, world, cases(BATCHES), (4, 2), "cpu")


@pytest.mark.parametrize(
    ("world", "heads"), [(2, (4, 2)), (2, (4, 1)), (4, (4, 2)), (3, (9, 3)), (8, (8, 2))]
)
def test_ulysses_swaps_heads_and_sums_replicated_key_heads(world, heads):
    """Hazard 21: key/value heads fewer than ranks are replicated, their gradients summed."""
    batches = FEW + BATCHES[:1]
    run_distributed(
        check_attention, world, cases(batches, exchanges=["ulysses"]), heads, "cpu", world
    )


@pytest.mark.parametrize(("world", "ulysses"), [(4, 2), (8, 4)])
def test_hybrid_swaps_heads_in_a_team_and_rows_between_teams(world, ulysses):
    both = cases(FEW + BATCHES[:1], exchanges=["hybrid", "gather"])
    run_distributed(check_attention, world, both, (4, 2), "cpu", ulysses)
