"""A checker that cannot fail proves nothing: every fault put into the distributed run is caught.

Each fault is a wrapper around one function of the distributed path; the command itself is unchanged
and must exit with 1 and name the rows that are wrong, and only those.
"""

import contextlib
import dataclasses
import json
from pathlib import Path
from unittest import mock

import pytest

from anchorcontext.testing import run_distributed

EXIT_PAST_TOLERANCE, EXIT_USER_ERROR = 1, 2


def gradient_scaled_by_two():
    from anchorcontext.parity import live

    real = live.run_micro_batch

    def twice(engine, plan, scale, meter):
        real(engine, plan, 2 * scale, meter)

    return mock.patch.object(live, "run_micro_batch", twice)


def accumulation_divided_again():
    """DeepSpeed's own division by the accumulation steps left in."""
    from deepspeed import DeepSpeedEngine

    real = DeepSpeedEngine.backward

    def divided(self, loss, **options):
        return real(self, loss, **{**options, "scale_wrt_gas": True})

    return mock.patch.object(DeepSpeedEngine, "backward", divided)


def anchor_counted_twice():
    from anchorcontext.kernels import anchor_forward_
    from anchorcontext.parallel import attention

    real = attention._forward

    def twice(q, k, v, plan, scale, rotations):
        state = real(q, k, v, plan, scale, rotations)
        if plan.sp_size > 1:
            keys = attention._KeyTravel(k, v, plan)
            list(keys)
            anchors = keys.anchors()
            for number, start, stop in plan.mine.anchors.queries.tolist():
                key, value = anchors.rows[number]
                anchor_forward_(state, q, key, value, scale, start, stop)
        return state

    return mock.patch.object(attention, "_forward", twice)


def shard_local_positions():
    import torch

    from anchorcontext.train import step

    real = step.shard

    def local(windows, plan, device=None):
        held = real(windows, plan, device)
        positions = torch.arange(plan.local_length, device=device).expand_as(held.position_ids)
        return dataclasses.replace(held, position_ids=positions)

    return mock.patch.object(step, "shard", local)


def boundary_lost():
    """The second and the third document of every window see each other; labels stay."""
    from anchorcontext.train import step
    from anchorcontext.window import Window

    real = step.make_plan

    def merged(windows, *args, **options):
        seen = []
        for window in windows:
            docs = window.segment_docs.copy()
            docs[docs == docs[3]] = docs[2]
            seen.append(Window(window.input_ids, window.cu_seqlens, window.mode, segment_docs=docs))
        return real(seen, *args, **options)

    return mock.patch.object(step, "make_plan", merged)


def last_target_of_a_shard_lost():
    from anchorcontext.train import step

    real = step.shard

    def lost(windows, plan, device=None):
        held = real(windows, plan, device)
        last = (held.labels[0] >= 0).nonzero()[-1]
        held.labels[0, last] = -100
        return held

    return mock.patch.object(step, "shard", lost)


UNREDUCED = "model.layers.1.mlp.up_proj.weight"


def one_gradient_not_reduced():
    from deepspeed import DeepSpeedEngine

    real = DeepSpeedEngine.allreduce_gradients

    def partly(self, *args, **options):
        parameter = self.module.causal_lm.get_parameter(UNREDUCED)
        own = parameter.grad.clone()
        real(self, *args, **options)
        parameter.grad.copy_(own)

    return mock.patch.object(DeepSpeedEngine, "allreduce_gradients", partly)


def replica_differs():
    """Rank 1 has another value in one weight, as after a missed broadcast."""
    import torch.distributed as dist

    from anchorcontext.train import job

    real = job.build_engine

    def built(*args):
        engine = real(*args)
        if dist.get_rank() == 1:
            engine.module.causal_lm.model.layers[0].mlp.up_proj.weight.data[3, 3] += 0.5
        return engine

    return mock.patch.object(job, "build_engine", built)


def nan_on_one_rank():
    import torch.distributed as dist

    from anchorcontext.parity import live

    real = live.logits_of

    def broken(*args):
        logits = real(*args)
        if dist.get_rank() == 1:
            logits[0, 5] = float("nan")
        return logits

    return mock.patch.object(live, "logits_of", broken)


LOGITS, LOSS = "logits: largest difference", "loss: relative difference"
NORM = "gradient norm: relative difference"

# fault -> the checks that must fail; whether gradients fail: all, one by name, some, none
FAULTS = {
    None: (set(), "none"),
    gradient_scaled_by_two: ({NORM}, "all"),
    accumulation_divided_again: ({NORM}, "all"),
    anchor_counted_twice: ({LOGITS, LOSS, NORM}, "some"),
    shard_local_positions: ({LOGITS, LOSS, NORM}, "some"),
    boundary_lost: ({LOGITS, LOSS, NORM}, "some"),
    last_target_of_a_shard_lost: ({LOSS, NORM}, "some"),
    one_gradient_not_reduced: ({NORM}, UNREDUCED),
    replica_differs: ({LOGITS}, "some"),
    nan_on_one_rank: ({LOGITS}, "none"),
}


DTYPES = ("fp32", "bf16")


def run_all(rank, world_size, configs):
    """The command's status and report, for every fault in turn, in one set of processes."""
    from anchorcontext.cli import main
    from anchorcontext.train.job import Job

    def command(config, *arguments):
        with pytest.raises(SystemExit) as end:
            main(["parity", config, *arguments], standalone_mode=False)
        return end.value.code

    outcomes = {}
    # The ranks of the test helper own their process group.
    with mock.patch.object(Job, "close", lambda job: job.engine.destroy()):
        for dtype, config in zip(DTYPES, configs, strict=True):
            report = f"{config}.{dtype}.json"
            for fault in FAULTS:
                with fault() if fault else contextlib.nullcontext():
                    code = command(config, "--json", report)
                found = json.loads(Path(report).read_text()) if rank == 0 else None
                outcomes[dtype, fault and fault.__name__] = code, found
        outcomes["unprepared data"] = command(config, "data.path=/nowhere/windows"), None
    return outcomes


@pytest.fixture(scope="module")
def outcomes(make_config, config_file):
    model = make_config().model.model_dump()
    configs = [
        str(config_file(train={"zero_stage": 0}, model={**model, "dtype": dtype}))
        for dtype in DTYPES
    ]
    return run_distributed(run_all, 2, configs, timeout=280)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: "no_fault" if f is None else f.__name__)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fault_is_caught_and_named(dtype, fault, outcomes):
    failing, gradients = FAULTS[fault]
    name = fault and fault.__name__
    code, report = outcomes[0][dtype, name]
    assert code == outcomes[1][dtype, name][0] == (0 if fault is None else EXIT_PAST_TOLERANCE)
    assert report["passed"] is (fault is None)
    for comparison in report["comparisons"]:
        failed = {check["quantity"] for check in comparison["checks"] if not check["passed"]}
        if dtype == "fp32":
            assert failed >= failing
        # What follows from a wrong logit is wrong, too; nothing else is.
        assert failed <= failing or LOGITS in failing
        wrong = [row["name"] for row in comparison["gradients"] if not row["passed"]]
        assert len(comparison["gradients"]) == 21
        if gradients == "all":
            assert len(wrong) == 21
        elif gradients == "none":
            assert not wrong
        elif gradients == "some":
            assert wrong
        else:
            assert wrong == [gradients]


def test_unprepared_data_is_a_user_error(outcomes):
    assert [outcome["unprepared data"][0] for outcome in outcomes] == [EXIT_USER_ERROR] * 2
