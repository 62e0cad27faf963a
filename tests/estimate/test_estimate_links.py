"""Bytes between ranks: equal to the plan's, and to what gloo ranks count in a training step."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from anchorcontext import Window
from anchorcontext.estimate.links import across_nodes, layer_bytes, row_traffic
from anchorcontext.plan import BatchPlan, RingFlashAttnPlan
from anchorcontext.testing import run_distributed
from anchorcontext.testing.models import tiny_config
from anchorcontext.watch.sizes import model_sizes

EXCHANGES = [("ring", 1), ("gather", 1), ("ulysses", 1), ("hybrid", 2), ("gather", 2)]


def make_windows(mode, seed=0):
    rng = np.random.default_rng(seed)
    lengths = [rng.integers(1, 40, size=9), rng.integers(1, 90, size=4)]
    return [
        Window.from_documents([[0] * n for n in part], anchor_id=1, mode=mode) for part in lengths
    ]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced"])
@pytest.mark.parametrize("mode", ["full", "intra_doc", "anchor"])
def test_every_pair_of_ranks_as_the_steps_of_the_plan_say(mode, layout):
    sizes = model_sizes(tiny_config(num_attention_heads=8, num_key_value_heads=4))
    for seed, (exchange, ulysses) in enumerate(EXCHANGES):
        for ranks in (4, 8):
            plan = BatchPlan(make_windows(mode, seed), ranks, layout, exchange, ulysses)
            sent = layer_bytes(plan, row_traffic(plan), sizes, element_size=2, forwards=2)
            expected = [
                plan.bytes_sent(
                    rank,
                    num_heads=8,
                    num_kv_heads=4,
                    head_dim=sizes.head_dim,
                    element_size=2,
                    forwards=2,
                )
                for rank in range(ranks)
            ]
            assert sent.sum(axis=1).tolist() == expected
            if plan.ulysses == 1:
                assert (sent == _from_steps(plan, 2 * 4 * sizes.head_dim)).all()


def _from_steps(plan, row):
    """From the messages themselves: three times the keys in bf16, their gradients in fp32."""
    sent = np.zeros((plan.sp_size, plan.sp_size), dtype=np.int64)
    for rank in range(plan.sp_size):
        mine = plan.rank(rank)
        for transfer in [*(step.incoming for step in mine.steps), mine.anchors.broadcast]:
            for message in transfer.sends:
                sent[rank, message.peer] += 3 * 2 * row * message.rows.num_rows
        for step in mine.steps:
            for message in step.returns.sends:
                sent[rank, message.peer] += 4 * row * message.rows.num_rows
        for message in mine.anchors.broadcast.receives:
            sent[rank, message.peer] += 4 * row * message.rows.num_rows
    return sent


def test_rows_held_and_messages_as_the_steps_of_the_plan_say():
    for exchange in ("ring", "gather"):
        for mode in ("full", "anchor"):
            plan = BatchPlan(make_windows(mode), 4, "zigzag", exchange)
            rows = row_traffic(plan)
            for rank in range(4):
                mine = plan.rank(rank)
                foreign = [0, *(step.num_rows for step in mine.steps[1:]), 0]
                held = [a + b for a, b in pairwise(foreign)]
                transfers = [*(s.incoming for s in mine.steps), mine.anchors.broadcast]
                assert rows.key_rows[rank] == max(held)
                assert rows.step_rows[rank] == max(foreign)
                assert rows.messages[rank] == sum(len(t.sends) for t in transfers)


@pytest.mark.parametrize("exchange", ["ring", "gather"])
def test_ring_flash_attn_sends_what_its_plan_says(exchange):
    sizes = model_sizes(tiny_config(num_attention_heads=8, num_key_value_heads=4))
    shape = {"num_heads": 8, "num_kv_heads": 4, "head_dim": sizes.head_dim, "element_size": 2}
    for ranks in (2, 4):
        plan = RingFlashAttnPlan(make_windows("full"), ranks, exchange=exchange)
        rows = row_traffic(plan)
        sent = layer_bytes(plan, rows, sizes, element_size=2, forwards=2)
        expected = [plan.bytes_sent(rank, **shape, forwards=2) for rank in range(ranks)]
        assert sent.sum(axis=1).tolist() == expected
        for rank in range(ranks):
            mine = plan.rank(rank)
            assert rows.messages[rank] == sum(len(s.incoming.sends) for s in mine.steps)
            assert rows.return_messages[rank] == sum(len(s.returns.sends) for s in mine.steps)


def test_nodes():
    inside = [[not value for value in row] for row in across_nodes(4, 2).tolist()]
    assert inside == [[True, True, False, False]] * 2 + [[False, False, True, True]] * 2
    assert not across_nodes(4, 8).any()
    assert across_nodes(2, 2, first_rank=1).tolist() == [[False, True], [True, False]]


def train_step(rank, world, exchange, checkpointing, mode, dtype):
    """Bytes that this rank counted in a forward and backward of TrainModel."""
    import torch
    import torch.distributed as dist

    from anchorcontext import enable, make_plan, shard
    from anchorcontext.model import TrainModel
    from anchorcontext.model.memory import checkpoint_layers
    from anchorcontext.testing.models import tiny_llama

    model = enable(tiny_llama(dtype=getattr(torch, dtype)))
    if checkpointing:
        checkpoint_layers(model)
    windows = make_windows(mode)
    plan = make_plan(windows, dist.group.WORLD, "auto", *exchange[:1], ulysses=exchange[1])
    local = shard(windows, plan)
    loss, _ = TrainModel(model)(local.input_ids, local.position_ids, local.labels, plan)
    loss.backward()
    return plan.meter.bytes_sent


@pytest.mark.parametrize(
    ("world", "exchange", "checkpointing", "mode", "dtype"),
    [
        (2, ("ring", 1), False, "anchor", "float32"),
        (3, ("ring", 1), True, "full", "bfloat16"),
        (4, ("gather", 1), True, "intra_doc", "float32"),
        (4, ("hybrid", 2), True, "anchor", "bfloat16"),
        (4, ("ulysses", 4), False, "anchor", "float32"),
    ],
)
def test_a_training_step_on_gloo_sends_what_was_predicted(
    world, exchange, checkpointing, mode, dtype
):
    counted = run_distributed(train_step, world, exchange, checkpointing, mode, dtype)
    sizes = model_sizes(tiny_config())
    plan = BatchPlan(make_windows(mode), world, "auto", *exchange)
    sent = layer_bytes(
        plan,
        row_traffic(plan),
        sizes,
        element_size=2 if dtype == "bfloat16" else 4,
        forwards=2 if checkpointing else 1,
    )
    assert counted == (sent.sum(axis=1) * sizes.num_layers).tolist()
    assert sum(counted) > 0
