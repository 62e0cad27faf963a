"""Where results are equal bit for bit: ulysses against one process, and a run against itself."""

from __future__ import annotations

import pytest

from anchorcontext.testing import run_distributed


def logits_of(rank, world, exchange, layout):
    """Gathered logits (L, V) of a tiny model on a window with documents of many lengths."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from anchorcontext import Window, enable, make_plan, shard, unshard
    from anchorcontext.testing.models import tiny_llama

    model = enable(tiny_llama(num_attention_heads=8)).eval()
    rng = np.random.default_rng(0)
    documents = [rng.integers(3, 128, size=n) for n in (70, 1, 300, 13, 127)]
    window = Window.from_documents(documents, anchor_id=1)
    plan = make_plan(window, dist.group.WORLD if world > 1 else None, layout, exchange)
    local = shard(window, plan)
    with torch.no_grad():
        out = model(local.input_ids, position_ids=local.position_ids, plan=plan).logits
    return unshard(out, plan)[0].float().numpy()


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced"])
@pytest.mark.parametrize("world", [2, 4])
def test_ulysses_gives_the_logits_of_one_process_bit_for_bit(world, layout):
    """Every head sees the same keys in the same order, so nothing is rounded differently."""
    alone = run_distributed(logits_of, 1, "auto", "contiguous")[0]
    split = run_distributed(logits_of, world, "ulysses", layout)[0]
    assert (alone == split).all()


def gradients_twice(rank, world, exchange):
    """Output and gradients of two runs, bytes compared on each rank."""
    import torch
    import torch.distributed as dist

    from anchorcontext import Window, distributed_attention, make_plan

    window = Window.from_documents([range(40), range(7), range(90)], anchor_id=0)
    runs = []
    for _ in range(2):
        plan = make_plan(window, dist.group.WORLD, "balanced", exchange)
        torch.manual_seed(rank)
        shapes = [(1, heads, plan.local_length, 16) for heads in (4, 2, 2, 4)]
        q, k, v, dout = (torch.randn(shape).bfloat16().requires_grad_() for shape in shapes)
        out = distributed_attention(q, k, v, plan)
        out.backward(dout.detach())
        runs.append((out, q.grad, k.grad, v.grad))
    return [bool(torch.equal(a, b)) for a, b in zip(*runs, strict=True)]


@pytest.mark.parametrize(("exchange", "world"), [("ring", 4), ("gather", 4), ("ulysses", 2)])
def test_two_runs_are_equal_bit_for_bit_forward_and_backward(exchange, world):
    """Sums over ranks are added in the plan's order, whenever their messages arrive."""
    assert run_distributed(gradients_twice, world, exchange) == [[True] * 4] * world
