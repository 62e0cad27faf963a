"""Every control across ranks: stock's numbers, and as many bytes sent as predicted."""

import gc
from unittest import mock

import numpy as np
import pytest

from anchorcontext.testing import run_distributed

FP32_ATTENTION = {"rope_tables": "fp32", "rotation": "fp32", "qk": "fp32"}
IN_FP32 = {
    "hidden anchor": {"attention": {"anchor": {"visible": False}}},
    "anchor elsewhere": {"attention": {"anchor": {"position": 70, "token": 9}}},
    "restart behind the anchor": {"attention": {"anchor": {"reset_positions": True}}},
    "copies": {"attention": {"anchor": {"copies": True}}},
    "clamped": {"attention": {"mode": "full"}, "positions": {"clamp_first": True}},
    "clamped, others shifted": {
        "attention": {"mode": "intra_doc"},
        "positions": {"clamp_first": True, "offset": 1000},
    },
}
BY_ENGINE = {"rope_tables": "fp32", "rotation": "engine"}
IN_BF16 = {
    "RoPE by the engine": {"attention": {"precision": BY_ENGINE}},
    "RoPE by the engine, ulysses": {
        "attention": {"precision": BY_ENGINE, "exchange": "ulysses"},
        "model": {"keep_attention": True},
        "train": {"zero_stage": 3},
    },
    "fp32 RoPE": {"attention": {"precision": {**FP32_ATTENTION, "qk": "model"}}},
    "fp32 attention, gather": {"attention": {"precision": FP32_ATTENTION, "exchange": "gather"}},
    "fp32 attention, ulysses": {
        "attention": {"precision": FP32_ATTENTION, "exchange": "ulysses"},
        "model": {"keep_attention": True},
        "train": {"zero_stage": 3},
    },
}


def controls_lost():
    """The ranks compute the plain mode of the config's."""
    from anchorcontext.train import step

    real = step.make_plan

    def plain(windows, *arguments, **options):
        return real([w.with_mode(w.mode.name) for w in windows], *arguments, **options)

    return mock.patch.object(step, "make_plan", plain)


def check(rank, world, configs):
    from anchorcontext.parity.check import check_parity
    from anchorcontext.train.costs import predicted_bytes
    from anchorcontext.train.job import Job
    from anchorcontext.train.step import count_targets, plan_micro_batches, train_step
    from anchorcontext.watch.metrics import StepMeter
    from anchorcontext.watch.sizes import sizes_of

    found = {}
    for name, config in configs.items():
        gc.freeze()  # DeepSpeed collects garbage six times a start, 0.3 s each with all of torch
        job = Job(config)
        coming = job.next_micro_batches()
        arguments = job.mesh, job.control, config
        report = check_parity(job.engine, coming, *arguments, cost=job.cost)
        assert report.passed, f"{name}: {report.text()}"
        if name in ("hidden anchor", "clamped"):
            with controls_lost():
                assert not check_parity(job.engine, coming, *arguments, cost=job.cost).passed, name
        plans = plan_micro_batches(coming, job.mesh, config.attention, job.control, job.cost)
        outcome = train_step(
            job.engine, plans, count_targets(coming, job.mesh, job.control), StepMeter(job.device)
        )
        assert outcome.skip_reason is None, name
        sizes = sizes_of(job.train_model.causal_lm)
        predicted = [predicted_bytes(plan, config, sizes) for plan in plans]
        assert [plan.meter.bytes_sent for plan in plans] == predicted, name
        (window, *_) = coming[0]
        found[name] = sum(predicted), window.position_ids.tolist(), window.input_ids.tolist()
        job.loader.close()
        job.engine.destroy()
    return found


@pytest.fixture(scope="module")
def found(make_config):
    """Per control: bytes sent, positions and ids of the first window, on rank 0."""
    configs = {"plain": make_config(attention={"exchange": "gather"})}
    configs |= {name: make_config(**sections) for name, sections in IN_FP32.items()}
    for name, sections in {"plain bf16": {}, **IN_BF16}.items():
        model = {"dtype": "bf16", **sections.get("model", {})}
        attention = {"exchange": "gather", **sections.get("attention", {})}
        configs[name] = make_config(**{**sections, "model": model, "attention": attention})
    return run_distributed(check, 2, configs, timeout=280, group_timeout=120)[0]


def test_windows_are_those_of_the_control(found):
    _, plain, ids = found["plain"]
    assert plain == list(range(64))
    assert found["hidden anchor"][1] == plain
    _, positions, tokens = found["anchor elsewhere"]
    assert positions == [70, *plain[1:]] and tokens == [9, *ids[1:]]
    restarted = np.array(found["restart behind the anchor"][1])
    copied = found["copies"]
    assert len(copied[1]) > len(plain)
    assert [p for p, t in zip(*copied[1:], strict=True) if t != 0] == plain[1:]
    starts = np.flatnonzero(restarted == 1)
    for sections, offset in (("clamped", 0), ("clamped, others shifted", 1000)):
        clamped = np.array(found[sections][1])
        assert set(starts) <= set(np.flatnonzero(clamped == 0))
        assert clamped[starts[0] + 1] == starts[0] + 1 + offset


def test_fp32_attention_sends_what_a_model_in_fp32_does(found):
    bf16, fp32 = found["plain bf16"][0], found["fp32 attention, gather"][0]
    assert bf16 < fp32 == found["plain"][0]
    assert found["fp32 RoPE"][0] == found["RoPE by the engine"][0] == bf16
