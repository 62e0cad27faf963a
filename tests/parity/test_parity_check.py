"""The check itself: every ZeRO stage and mesh passes, and nothing is left behind in the engine."""

import random
import time
from unittest import mock

import numpy as np
import pytest
import torch

from anchorcontext import Window, make_plan
from anchorcontext.config.sections import AttentionSection
from anchorcontext.parity.baseline import SingleDeviceBaseline, exact_cross_entropy
from anchorcontext.parity.check import check_logits, check_parity
from anchorcontext.parity.ranks import on_rank_zero
from anchorcontext.parity.report import ParityError
from anchorcontext.testing import run_distributed
from anchorcontext.testing.models import tiny_model
from anchorcontext.train.consolidate import gather_state_dict
from anchorcontext.train.control import Control
from anchorcontext.train.job import Job
from anchorcontext.train.step import count_targets, plan_micro_batches, train_step
from anchorcontext.watch.metrics import StepMeter


def one_step(job):
    micro_batches = job.next_micro_batches()
    plans = plan_micro_batches(micro_batches, job.mesh, job.config.attention, job.control)
    num_targets = count_targets(micro_batches, job.mesh, job.control)
    return train_step(job.engine, plans, num_targets, StepMeter(job.device))


def random_states():
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]


def trained(job, checks):
    """Weights and norms after two steps, with or without checks before each; the reports."""
    reports, norms = [], []
    for _ in range(2):
        if checks:
            before = random_states()
            micro_batches = job.peek_micro_batches(job.shape.accumulation)
            arguments = job.engine, micro_batches, job.mesh, job.control, job.config
            reports += [check_parity(*arguments), check_logits(*arguments)]
            assert random_states() == before
        norms.append(one_step(job).grad_norm)
    weights = gather_state_dict(job.engine)
    job.engine.destroy()
    return weights, norms, reports


def with_and_without_checks(rank, world_size, configs):
    results = []
    for config in configs:
        plain, plain_norms, _ = trained(Job(config), checks=False)
        checked, norms, reports = trained(Job(config), checks=True)
        assert norms == plain_norms
        assert all(torch.equal(checked[name], weight) for name, weight in plain.items())
        assert all(report.passed for report in reports), [report.text() for report in reports]
        results.append([len(comparison.gradients) for comparison in reports[0].comparisons])
    return results


OFFLOAD = {
    "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
    "zero_force_ds_cpu_optimizer": False,
}


@pytest.mark.parametrize(
    ("stage", "sp", "windows_per_step", "micro_batch_windows", "variants"),
    [
        (0, 2, 2, 1, [("fp32", {}), ("bf16", {})]),
        (1, 1, 4, 1, [("fp32", {})]),
        (1, 2, 1, 1, [("bf16", {})]),
        (2, 1, 4, 2, [("fp32", {}), ("bf16", OFFLOAD)]),
        (3, 2, 2, 1, [("fp32", {}), ("bf16", {}), ("fp32", OFFLOAD)]),
    ],
)
def test_passes_and_leaves_the_engine_as_it_was(
    stage, sp, windows_per_step, micro_batch_windows, variants, make_config
):
    train = {
        "zero_stage": stage,
        "windows_per_step": windows_per_step,
        "micro_batch_windows": micro_batch_windows,
    }
    model = make_config().model.model_dump()
    configs = [
        make_config(
            train=train,
            parallel={"sp": sp},
            model={**model, "dtype": dtype},
            deepspeed=deepspeed,
        )
        for dtype, deepspeed in variants
    ]
    for counts in run_distributed(with_and_without_checks, 2, configs):
        assert counts == [[21, 21]] * len(configs)


def logits_of_an_exact_run(rank, world_size, config):
    job = Job(config)
    report = check_logits(job.engine, job.peek_micro_batches(), job.mesh, job.control, job.config)
    (comparison,) = report.comparisons
    return comparison.logits.num_values, comparison.logits.max_abs


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_exact_run_has_the_logits_of_one_device_bit_for_bit(dtype, make_config):
    model = {**make_config().model.model_dump(), "dtype": dtype}
    config = make_config(attention={"exact": True}, model=model, train={"deterministic": True})
    for num_values, difference in run_distributed(logits_of_an_exact_run, 2, config):
        assert num_values > 0 and difference == 0


def logits_with_a_fault(rank, world_size, config):
    job = Job(config)
    arguments = job.engine, job.peek_micro_batches(), job.mesh, job.control, job.config
    assert check_logits(*arguments).passed
    if rank == 1:
        job.engine.module.causal_lm.model.norm.weight.data *= 1.001
    report = check_logits(*arguments, title="logit check after step 7")
    with pytest.raises(ParityError, match=r"(?s)logit check after step 7.*FAILED"):
        report.raise_if_failed()
    return report.text()


def test_logit_check_fails_on_every_rank_with_the_same_table(make_config):
    texts = run_distributed(logits_with_a_fault, 2, make_config(train={"zero_stage": 1}))
    assert texts[0] == texts[1]


def slow_rank_zero(rank, world_size):
    control = Control.create()
    waited = on_rank_zero(control, lambda: time.sleep(3.0) or "done", "nothing")
    control.barrier()
    return waited


def test_ranks_wait_for_rank_zero_longer_than_the_group_timeout():
    assert run_distributed(slow_rank_zero, 3, group_timeout=1.5) == ["done", None, None]


def broken_rank_zero(rank, world_size):
    def fail():
        raise MemoryError("no room")

    expected = MemoryError if rank == 0 else RuntimeError
    with pytest.raises(expected, match="no room") as error:
        on_rank_zero(Control.create(), fail, "the baseline's model")
    return str(error.value)


def test_a_failure_of_rank_zero_reaches_every_rank():
    first, second = run_distributed(broken_rank_zero, 2)
    assert first == "no room"
    assert second.endswith("while it computed the baseline's model: MemoryError: no room")


def test_logits_travel_in_messages_of_bounded_size(make_config):
    """Also when a message holds one token, and when it holds all of them."""
    for size in (4 * 128, 1 << 30):
        for passed, most in run_distributed(messages, 2, make_config(), size):
            assert passed and most <= max(1, size // 512)


def messages(rank, world_size, config, size):
    from anchorcontext.parity import live

    rows, real = [], live.logits_of

    def counted(hidden, head, tokens):
        rows.append(len(tokens))
        return real(hidden, head, tokens)

    job = Job(config)
    with (
        mock.patch.object(live, "MESSAGE_BYTES", size),
        mock.patch.object(live, "logits_of", counted),
    ):
        report = check_logits(
            job.engine, job.peek_micro_batches(), job.mesh, job.control, job.config
        )
    assert sum(rows) == 32
    return report.passed, max(rows)


@pytest.mark.parametrize("rows", [1, 5, 100])
def test_exact_cross_entropy_against_autograd(rows, monkeypatch):
    monkeypatch.setattr("anchorcontext.parity.baseline.ORACLE_ROWS", rows)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 30, generator=generator)
    labels = torch.randint(0, 30, (12,), generator=generator)
    labels[[3, 11]] = -100
    loss, gradient = exact_cross_entropy(logits, labels, 0.25)
    wide = logits.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(wide, labels, reduction="sum")
    (0.25 * expected).backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-12)
    torch.testing.assert_close(gradient, wide.grad.float())
    assert exact_cross_entropy(logits, labels, None)[1] is None


@pytest.mark.parametrize(
    ("dtype", "engine"), [(torch.bfloat16, "reference"), (torch.float32, "cpu")]
)
def test_the_engine_asked_for_need_not_have_the_dtype_of_the_judge(dtype, engine):
    """Engines of flash attention serve bf16 alone; ``auto`` is ``cpu`` here."""
    model = tiny_model(dtype=torch.bfloat16)
    section = AttentionSection(engine="reference")
    cpu, weights = torch.device("cpu"), model.state_dict()
    baseline = SingleDeviceBaseline(model, weights, dtype, cpu, 16, section)
    with mock.patch("anchorcontext.parity.baseline.make_plan", wraps=make_plan) as planned:
        baseline.run(Window.from_documents([range(9)], mode="full"), None)
        plan = make_plan(Window.from_documents([range(9)], mode="full"), **planned.call_args.kwargs)
    assert plan.engine(cpu, dtype).name == engine
