"""Rounding: what is equal bit for bit, and the error of bf16 on any number of ranks."""

from __future__ import annotations

from itertools import accumulate

import pytest

from anchorcontext import Window
from anchorcontext.errors import UserError
from anchorcontext.plan import BatchPlan
from anchorcontext.testing import run_distributed


def logits_of(rank, world, runs):
    """Gathered logits (L, V) of a tiny model, for each (exchange, layout, exact, mode, dtype), on a
    window of documents of many lengths, two of them interleaved."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from anchorcontext import Window, enable, make_plan, shard, unshard
    from anchorcontext.testing.models import tiny_llama

    models = {
        dtype: enable(tiny_llama(num_attention_heads=8)).to(getattr(torch, dtype)).eval()
        for dtype in ("float32", "bfloat16")
    }
    rng = np.random.default_rng(0)
    lengths = (1, 70, 1, 300, 13, 1127, 90, 64)
    window = Window(
        rng.integers(3, 128, size=sum(lengths)),
        np.cumsum((0, *lengths)),
        segment_docs=[0, 1, 2, 3, 1, 4, 5, 3],
    )
    logits = []
    for exchange, layout, exact, mode, dtype in runs:
        group = dist.group.WORLD if world > 1 else None
        plan = make_plan(window.with_mode(mode), group, layout, exchange, exact=exact)
        local = shard(plan.windows, plan)
        with torch.no_grad():
            out = models[dtype](local.input_ids, position_ids=local.position_ids, plan=plan)
        logits.append(unshard(out.logits, plan)[0].float().numpy())
    return logits


LAYOUTS = ("contiguous", "zigzag", "balanced")


@pytest.mark.parametrize("world", [2, 4])
def test_ulysses_gives_the_logits_of_one_process_bit_for_bit(world):
    """Every head sees the same keys in the same order, so nothing is rounded differently."""
    (alone,) = run_distributed(logits_of, 1, [("auto", "contiguous", False, "anchor", "float32")])[
        0
    ]
    runs = [("ulysses", layout, False, "anchor", "float32") for layout in LAYOUTS]
    for split in run_distributed(logits_of, world, runs)[0]:
        assert (alone == split).all()


EXACT_CASES = [("anchor", "float32"), ("full", "float32"), ("intra_doc_reset", "bfloat16")]


@pytest.fixture(scope="module")
def exact_alone():
    runs = [("auto", "contiguous", True, *case) for case in EXACT_CASES]
    return dict(zip(EXACT_CASES, run_distributed(logits_of, 1, runs)[0], strict=True))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_exact_gives_the_logits_of_one_process_bit_for_bit(world, exact_alone):
    runs = [
        (exchange, layout, True, *case)
        for exchange in ("gather", "ulysses")
        for layout in LAYOUTS
        for case in EXACT_CASES
        if exchange == "gather" or world != 3
    ]
    for run, split in zip(runs, run_distributed(logits_of, world, runs)[0], strict=True):
        assert (exact_alone[run[3:]] == split).all(), run


def test_without_exact_gather_differs_in_the_last_bits(exact_alone):
    """Otherwise the test above would show nothing."""
    runs = [("gather", "zigzag", False, "anchor", "float32")]
    difference = abs(run_distributed(logits_of, 4, runs)[0][0] - exact_alone["anchor", "float32"])
    assert 0 < difference.max() < 1e-5


def compare_exact(rank, world, ulysses):
    """Largest difference of output and gradients with and without exact, fp64, over layouts, modes
    and two windows a micro-batch; and that as many bytes travel as the plan says."""
    import torch
    import torch.distributed as dist

    from anchorcontext import Window, distributed_attention, make_plan

    group = dist.group.WORLD if world > 1 else None
    docs = [0, 1, 2, 1, 3, 2]
    worst = 0.0
    for layout in LAYOUTS:
        for mode in ("full", "intra_doc", "anchor"):
            windows = [
                Window(range(sum(lengths)), [0, *accumulate(lengths)], mode, segment_docs=docs)
                for lengths in ((1, 40, 7, 90, 65, 3), (1, 3, 100, 2, 1, 30))
            ]
            found = []
            for exact in (False, True):
                plan = make_plan(windows, group, layout, "gather", ulysses=ulysses, exact=exact)
                torch.manual_seed(rank)
                shapes = [(2, heads, plan.local_length, 8) for heads in (4, 2, 2, 4)]
                inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
                q, k, v, dout = (x.requires_grad_() for x in inputs)
                out = distributed_attention(q, k, v, plan)
                out.backward(dout.detach())
                found.append((out, q.grad, k.grad, v.grad))
                predicted = plan.predicted_bytes(
                    num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float64
                )
                assert plan.meter.bytes_sent == predicted
            pairs = zip(*found, strict=True)
            worst = max(worst, *(float((a - b).detach().abs().max()) for a, b in pairs))
    return worst


@pytest.mark.parametrize(("world", "ulysses"), [(1, 1), (3, 1), (4, 2)])
def test_exact_changes_nothing_but_the_rounding(world, ulysses):
    worst = max(run_distributed(compare_exact, world, ulysses))
    assert 0 < worst < 1e-12


def test_a_ring_cannot_be_exact():
    for exchange in ("ring", "hybrid"):
        with pytest.raises(UserError, match=f"exchange '{exchange}' with exact.*use .*gather"):
            BatchPlan(
                [Window.from_documents([[1, 2]], anchor_id=0)], 4, "auto", exchange, 2, exact=True
            )


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


def bf16_errors(rank, world, exchange):
    """Errors of output and gradients against fp64, relative in norm, for each mode and seed."""
    import torch
    import torch.distributed as dist

    from anchorcontext import Window, distributed_attention, make_plan, unshard

    errors = {}
    for mode in ("anchor", "full"):
        documents = [range(300), range(5), range(718)]
        window = Window.from_documents(documents, anchor_id=0, mode=mode)
        plan = make_plan(window, dist.group.WORLD, "zigzag", exchange)
        assert plan.padded_length == window.num_tokens == 1024
        rows = torch.from_numpy(plan.data.local_indices(rank, 0))
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            whole = [
                torch.randn(1, heads, 1024, 32, generator=generator).bfloat16()
                for heads in (4, 2, 2, 4)
            ]
            q, k, v, dout = (x[:, :, rows].clone().requires_grad_() for x in whole)
            out = distributed_attention(q, k, v, plan)
            out.backward(dout.detach())
            results = (out, q.grad, k.grad, v.grad)
            assert {x.dtype for x in results} == {torch.bfloat16}
            found = [unshard(x.transpose(1, 2), plan).transpose(1, 2).double() for x in results]
            if rank:
                continue
            q, k, v = (x.double().requires_grad_() for x in whole[:3])
            exact = distributed_attention(q, k, v, make_plan(window))
            gradients = torch.autograd.grad(exact, (q, k, v), whole[3].double())
            errors[mode, seed] = [
                ((got - want).norm() / want.norm()).item()
                for got, want in zip(found, (exact.detach(), *gradients), strict=True)
            ]
    return errors


@pytest.mark.parametrize("exchange", ["ring", "gather"])
def test_the_bf16_error_does_not_grow_with_the_ranks(exchange):
    """Hazard 19: accumulators are fp32 and gradients rounded once, so they are as exact as a single
    device's. A partial output leaves the engine in bf16, one rounding more; a mean of such
    roundings is never larger than one, however many ranks: 1.5 x is promised, 1.15 x measured.
    """
    errors = {world: run_distributed(bf16_errors, world, exchange)[0] for world in (1, 2, 4, 8)}
    for case, alone in errors[1].items():
        for index, name in enumerate(("out", "dq", "dk", "dv")):
            split = [errors[world][case][index] for world in (2, 4, 8)]
            allowed = 1.2 if name == "out" else 1.05
            assert max(split) <= allowed * alone[index], (name, case, alone[index], split)
            assert split[-1] <= 1.1 * split[0], (name, case, split)
