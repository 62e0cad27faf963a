"""Steps that go wrong: held back, counted, written down for replay, and ended where a rule says."""

import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from anchorcontext.config.sections import GuardsSection, SpikeSection
from anchorcontext.data import WindowRecord, build_folder
from anchorcontext.errors import UserError
from anchorcontext.testing import run_distributed
from anchorcontext.train.checkpoint_files import find_checkpoints
from anchorcontext.train.consolidate import gather_state_dict
from anchorcontext.train.guards import DivergedError, Guards
from anchorcontext.train.loop import Trainer
from anchorcontext.train.step import GRADIENT_SPIKE, LOSS_SPIKE, NO_TARGETS, NOT_FINITE
from anchorcontext.train.watchdog import Watchdog
from anchorcontext.watch.jsonl import read_metrics
from anchorcontext.watch.metrics import LocalStep, make_record


def record(step, loss, norm=1.0, reason=None, targets=1):
    share = LocalStep(loss_sum=loss, loss_tokens=targets, tokens=4, seconds=1.0)
    return make_record(
        [share], step=step, lr=1.0, grad_norm=norm, windows=[step], skip_reason=reason
    )


def test_a_run_of_broken_steps_stops_and_a_good_one_starts_the_count_anew():
    guards = Guards(GuardsSection(max_skipped=2), num_windows=10)
    nan = float("nan")
    stops = [
        [finding.stops for finding in guards.judge(record(step, loss, reason=reason))]
        for step, (loss, reason) in enumerate(
            [(nan, NOT_FINITE), (2.0, None), (nan, NOT_FINITE), (2.0, NOT_FINITE)]
        )
    ]
    assert stops == [[False], [], [False], [True]]


def test_spikes_are_measured_by_the_median_and_held_back_ones_are_no_history():
    rule = SpikeSection(factor=3.0, action="skip")
    guards = Guards(GuardsSection(loss_spike=rule, gradient_spike=rule), num_windows=10)
    assert guards.limits.loss is None, "8 steps before a median says anything"
    for step in range(8):
        assert guards.judge(record(step, 2.0 + step % 2, norm=0.5)) == []
    assert (guards.limits.loss, guards.limits.grad_norm) == (7.5, 1.5)
    (finding,) = guards.judge(record(8, 40.0, norm=0.5, reason=LOSS_SPIKE))
    assert finding.name == "loss_spike" and "was not applied" in finding.text
    assert guards.limits.loss == 7.5
    resumed = Guards(guards.section, num_windows=10)
    resumed.load_state_dict(json.loads(json.dumps(guards.state_dict())))
    assert resumed.limits == guards.limits


def test_log_never_holds_back_and_stop_stops():
    for action, stops in (("log", False), ("stop", True)):
        rule = SpikeSection(factor=2.0, action=action)
        guards = Guards(GuardsSection(gradient_spike=rule), num_windows=10)
        for step in range(8):
            guards.judge(record(step, 2.0))
        assert guards.limits.grad_norm is None
        (finding,) = guards.judge(record(8, 2.0, norm=5.0))
        assert finding.stops == stops and finding.name == "gradient_spike"


def test_a_dataset_without_any_target_is_refused_once_all_of_it_was_seen():
    guards = Guards(GuardsSection(), num_windows=3)
    nothing = [record(step, 0.0, None, NO_TARGETS, targets=0) for step in range(3)]
    assert guards.judge(nothing[0]) == guards.judge(nothing[1]) == []
    guards.judge(record(3, 2.0))
    guards.judge(nothing[0])
    guards.judge(nothing[1])
    with pytest.raises(UserError, match=r"all 3 of data\.path: there is nothing to learn"):
        guards.judge(nothing[2])


def held_back(rank, world_size, configs):
    """Two steps, of which the second is over a limit: what it changed, and that a third applies."""
    found = {}
    for key, (config, limit) in configs.items():
        trainer = Trainer(config)
        trainer.run_step()
        before, rates = gather_state_dict(trainer.job.engine), trainer.job.engine.get_lr()
        scheduler = trainer.job.engine.lr_scheduler.state_dict()
        type(trainer.guards).limits = limit
        record = trainer.run_step()
        after = gather_state_dict(trainer.job.engine)
        same = all(torch.equal(before[name], after[name]) for name in before)
        same_schedule = scheduler == trainer.job.engine.lr_scheduler.state_dict()
        same_rate = trainer.job.engine.get_lr() == rates
        del type(trainer.guards).limits
        type(trainer.guards).limits = type(limit)()
        applied = trainer.run_step()
        last = gather_state_dict(trainer.job.engine)
        moved = any(not torch.equal(last[name], after[name]) for name in last)
        found[key] = (record.skip_reason, same, same_schedule, same_rate, applied.skipped, moved)
        trainer.sinks.close()
        trainer.job.loader.close()
        trainer.job.engine.destroy()
    return found if rank == 0 else {}


def test_a_spike_changes_neither_weights_nor_schedule_on_any_stage(tiny):
    from anchorcontext.train.step import StepLimits

    limits = {LOSS_SPIKE: StepLimits(loss=1e-3), GRADIENT_SPIKE: StepLimits(grad_norm=1e-3)}
    configs = {
        (stage, dtype, reason): (
            tiny(
                run={"name": f"{stage}-{dtype}-{reason[:4]}"},
                model={"dtype": dtype},
                parallel={"sp": 2},
                train={"zero_stage": stage},
                schedule={"type": "cosine"},
            ),
            limits[reason],
        )
        for stage, dtype, reason in [
            (0, "fp32", GRADIENT_SPIKE),
            (0, "bf16", GRADIENT_SPIKE),
            (1, "bf16", GRADIENT_SPIKE),
            (2, "fp32", LOSS_SPIKE),
            (3, "fp32", GRADIENT_SPIKE),
        ]
    }
    found = run_distributed(held_back, 2, configs, group_timeout=60.0)[0]
    for (stage, dtype, reason), outcome in found.items():
        assert outcome == (reason, True, True, True, False, True), (stage, dtype)


def poisoned(rank, world_size, config):
    """NaN in the forward of one step."""
    trainer = Trainer(config)

    def poison(module, arguments, output):
        return output * float("nan") if trainer.step == 2 and rank == 1 else output

    trainer.job.train_model.causal_lm.model.layers[0].mlp.register_forward_hook(poison)
    report = trainer.run()
    return report.num_skipped, trainer.job.loader.position


def test_a_broken_step_is_passed_over_and_written_down_for_replay(tiny):
    config = tiny(parallel={"sp": 2}, train={"steps": 4})
    assert run_distributed(poisoned, 2, config) == [(1, 16), (1, 16)]
    run = Path(config.run.output_dir) / "tiny"
    records, events = read_metrics(run / "metrics.jsonl")
    assert [r["skip_reason"] for r in records] == [None, None, NOT_FINITE, None]
    assert [e["name"] if "name" in e else e["event"] for e in events].count("not_finite") == 1
    dump = json.loads((run / "guards" / "step-000003-not_finite.json").read_text())
    assert dump["position"] == 8 and dump["record"]["windows"] == records[2]["windows"]
    assert [w["window"] for w in dump["windows"]] == records[2]["windows"]
    names = [d["name"] for d in dump["windows"][0]["documents"]]
    assert names == ["a", "b", "c", "d"][: len(names)] and names
    assert sum(d["tokens"] for d in dump["windows"][0]["documents"]) == 23


def breaking(rank, world_size, config):
    """The weights are lost after step 2."""
    trainer = Trainer(config)
    own = trainer.run_step

    def run_step():
        if trainer.step == 2:
            with torch.no_grad():
                for parameter in trainer.job.train_model.parameters():
                    parameter.fill_(float("nan"))
        return own()

    trainer.run_step = run_step
    with pytest.raises(DivergedError, match=r"the last checkpoint is of step 2"):
        trainer.run()
    return [c.step for c in find_checkpoints(trainer.checkpoints.folder)[0]]


def test_a_run_that_breaks_does_not_displace_the_checkpoints_from_before(tiny):
    config = tiny(train={"steps": 9}, checkpoint={"every": 1, "keep": 2}, guards={"max_skipped": 3})
    assert run_distributed(breaking, 1, config) == [[1, 2]]


def without_targets(rank, world_size, config):
    try:
        Trainer(config).run()
    except UserError as error:
        return str(error)
    return None


def test_a_run_without_any_target_ends_with_the_reason(tiny, tmp_path):
    """Documents of one token each predict nothing."""
    path = tmp_path / "ones"
    with build_folder(path) as builder:
        builder.write_documents([(["s"] * 23, [str(n) for n in range(23)], np.ones(23, int))])
        one = WindowRecord(
            np.arange(24), np.arange(25), np.arange(-1, 23), np.zeros(24, dtype=np.int64)
        )
        builder.write_windows([one] * 8)
        builder.write_meta(
            {"anchor_id": 0, "vocab_size": 128, "window_tokens": 24, "num_documents": 23}
        )
    config = tiny(data={"path": str(path)}, train={"steps": 50})
    (message,) = run_distributed(without_targets, 1, config)
    assert "8 windows in a row have no valid target" in message


def test_fp16_is_refused_by_name(tiny):
    with pytest.raises(UserError, match=r"model\.dtype"):
        tiny(model={"dtype": "fp16"})
    with pytest.raises(UserError, match=r"fp16.*contradicts model\.dtype"):
        tiny(deepspeed={"fp16": {"enabled": True}})


def test_the_watchdog_writes_every_threads_stack_once_in_a_slow_step(tmp_path):
    watchdog = Watchdog(4.0, tmp_path / "guards" / "stacks.txt", shortest=0.2)
    waiting = threading.Event()

    def something_that_hangs():
        waiting.wait()

    thread = threading.Thread(target=something_that_hangs)
    thread.start()
    for _ in range(5):
        with watchdog.step():
            pass
    assert watchdog.limit == 0.2 and not watchdog.file.exists()
    with watchdog.step():
        time.sleep(0.5)
    waiting.set()
    watchdog.close()
    text = watchdog.file.read_text()
    assert watchdog.fired == 1 and text.count("--- ") == 1
    assert "something_that_hangs" in text and "test_the_watchdog" in text


def test_a_watchdog_that_is_off_never_fires(tmp_path):
    watchdog = Watchdog(None, tmp_path / "stacks.txt", shortest=0.0)
    for _ in range(8):
        with watchdog.step():
            pass
    assert watchdog.limit is None
