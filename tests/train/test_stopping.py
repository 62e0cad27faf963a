"""How a run ends before its last step: signals, failing ranks, disks that are full."""

import os
import resource
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from anchorcontext.config.sections import CheckpointSection
from anchorcontext.testing import run_distributed
from anchorcontext.train import failure
from anchorcontext.train.checkpoint import SaveError
from anchorcontext.train.checkpoint_files import find_checkpoints
from anchorcontext.train.consolidate import load_consolidated_state_dict
from anchorcontext.train.control import RankError
from anchorcontext.train.failure import failing_together
from anchorcontext.train.loop import Trainer, train
from anchorcontext.train.retention import disposable, is_due
from anchorcontext.train.signals import StopSignals
from anchorcontext.watch.history import read_run
from anchorcontext.watch.jsonl import read_metrics

STEPS = 6


def short_run(tiny, name, **checkpoint):
    return tiny(
        run={"name": name},
        parallel={"sp": 2},
        train={"steps": STEPS, "zero_stage": 2},
        schedule={"type": "cosine"},
        checkpoint=checkpoint,
    )


def folder(config):
    return Path(config.run.output_dir) / config.run.name


def final_weights(config):
    return load_consolidated_state_dict(folder(config) / "checkpoints" / f"step-{STEPS:06d}")


def undisturbed(rank, world_size, *configs):
    return [train(config).step for config in configs]


def test_a_run_that_is_done_says_so_again(tiny):
    config = short_run(tiny, "done")
    run_distributed(undisturbed, 2, config, config)
    run = read_run(folder(config))
    assert [(start["step"], start["ended"]) for start in run.starts] == [(0, "done"), (6, "done")]
    assert run.state == "done" and len(run.records) == STEPS


def signalled(rank, world_size, config, number):
    """The signal reaches rank 1 alone, inside the backward pass of step 3."""
    with StopSignals() as stop:
        trainer = Trainer(config, stop)

        def ask(module, gradients_in, gradients_out):
            if trainer.step == 2 and rank == 1 and stop.name is None:
                os.kill(os.getpid(), number)
                while stop.name is None:
                    time.sleep(0.001)

        trainer.job.train_model.causal_lm.model.layers[0].register_full_backward_hook(ask)
        report = trainer.run()
    return report.stopped_by, report.step, report.checkpoint.name


def test_a_signal_to_one_rank_ends_the_step_saves_and_resumes_bit_for_bit(tiny):
    number = signal.SIGUSR1  # SIGTERM: test_chaos
    reference, config = short_run(tiny, "reference"), short_run(tiny, "stopped")
    ended = run_distributed(signalled, 2, config, number)
    assert ended == [(number.name, 3, "step-000003")] * 2
    assert read_metrics(folder(config) / "metrics.jsonl")[1][-1]["event"] == "stop"
    run_distributed(undisturbed, 2, config, reference)
    true = final_weights(reference)
    assert all(torch.equal(weight, true[name]) for name, weight in final_weights(config).items())
    losses = [
        [r["loss"] for r in read_metrics(folder(c) / "metrics.jsonl")[0]]
        for c in (reference, config)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS


def signalled_twice(rank, world_size):
    """Rank 0 waits in a collective, where Python runs no handler."""
    with StopSignals():
        pids = [None] * world_size
        dist.all_gather_object(pids, os.getpid())
        if rank == 0:
            dist.barrier()
        for _ in range(2):
            os.kill(pids[0], signal.SIGTERM)
            time.sleep(1.3)
        time.sleep(30)


def test_a_second_signal_ends_the_process_even_inside_a_collective():
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 0 of 2 ended with 143"):
        run_distributed(signalled_twice, 2, group_timeout=60.0)
    assert time.monotonic() - started < 25


def test_what_a_terminal_and_a_launcher_both_send_is_one_signal():
    with StopSignals() as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 10
        while stop.name is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert stop.name == "SIGINT"
        time.sleep(0.1)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "handlers are given back"


def failing(rank, world_size, hangs):
    """Rank 1 fails; rank 0's connection breaks, or it hangs as NCCL does."""
    failure.POLL_SECONDS, failure.ECHO_SECONDS = 0.1, 2.0
    failure.GRACE_SECONDS = 0.3 if hangs else 20.0
    try:
        with failing_together():
            if rank == 1:
                raise OSError("the disk of rank 1 is gone")
            if hangs:
                threading.Event().wait(60)
            time.sleep(0.5)
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")
    except (OSError, RankError) as error:
        if hangs:
            time.sleep(20)  # the store's file stays until rank 0 is gone
        return type(error).__name__, str(error)


def test_a_broken_connection_is_told_as_the_error_that_broke_it():
    first, second = run_distributed(failing, 2, False)
    assert second == ("OSError", "the disk of rank 1 is gone")
    assert first == ("RankError", "rank 1 failed: OSError: the disk of rank 1 is gone")


def test_a_rank_that_hangs_is_ended_when_another_one_fails():
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 0 of 2 ended with 1"):
        run_distributed(failing, 2, True)
    assert time.monotonic() - started < 15


def full_disk(rank, world_size, config, steps):
    """Rank 1 may write no file over 16 KiB while it saves the checkpoints of ``steps``."""
    trainer = Trainer(config)
    own = trainer.checkpoints.save

    def save(engine, step, state):
        limit = 1 << 14 if rank == 1 and step in steps else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        own(engine, step, state)

    trainer.checkpoints.save = save
    try:
        report = trainer.run()
    except SaveError as error:
        return str(error)
    return report.failed_saves


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_costs_a_checkpoint_and_nothing_else(tiny, background):
    config = short_run(tiny, "full", every=2, background=background)
    assert run_distributed(full_disk, 2, config, [4]) == [1, 1]
    complete, torn = find_checkpoints(folder(config) / "checkpoints")
    assert [checkpoint.step for checkpoint in complete] == [2, 6] and torn == []
    events = read_metrics(folder(config) / "metrics.jsonl")[1]
    (failed,) = [event for event in events if event["event"] == "checkpoint_failed"]
    assert failed["step"] == 4 and "step 4 was not written" in failed["error"]
    assert "rank 1" in failed["error"]


def test_a_disk_that_stays_full_ends_the_run_with_its_name_on_every_rank(tiny):
    config = short_run(tiny, "full", every=1, failures=2)
    first, second = run_distributed(full_disk, 2, config, [3, 4, 5, 6])
    for message in (first, second):
        assert "step 4 was not written" in message and "run.output_dir" in message
    assert "MiB are free there" in second
    assert [c.step for c in find_checkpoints(folder(config) / "checkpoints")[0]] == [1, 2]


def test_saving_in_the_background_writes_the_same_checkpoint(tiny):
    configs = [
        short_run(tiny, str(background), every=2, background=background)
        for background in (False, True)
    ]
    run_distributed(undisturbed, 2, *configs)
    ours, theirs = (final_weights(config) for config in configs)
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())
    for config in configs:
        steps = [c.step for c in find_checkpoints(folder(config) / "checkpoints")[0]]
        assert steps == [4, 6]
        records, events = read_metrics(folder(config) / "metrics.jsonl")
        assert sum(r["seconds_checkpoint"] for r in records) > 0
        assert [e["step"] for e in events if e["event"] == "checkpoint"] == [2, 4, 6]


def written_and_kept(section, total):
    """The steps whose checkpoints are there after the run."""
    there = []
    for step in range(1, total + 1):
        if is_due(step, total, section):
            there.append(step)
            gone = disposable(there, total, section)
            there = [kept for kept in there if kept not in gone]
    return there


@pytest.mark.parametrize(
    ("section", "kept"),
    [
        ({}, [100]),
        ({"final": False}, []),
        ({"every": 7}, [98, 100]),
        ({"every": 7, "keep": 3}, [91, 98, 100]),
        ({"every": 10, "keep_every": 40}, [40, 80, 90, 100]),
        ({"keep_every": 40, "keep": 1}, [40, 80, 100]),
        ({"every": 25, "snapshots": {}}, [60, 70, 80, 90, 100]),
        ({"snapshots": {"last": 3, "apart": 5}, "final": False, "keep": 1}, [90, 95, 100]),
    ],
)
def test_which_checkpoints_are_there_in_the_end(section, kept):
    assert written_and_kept(CheckpointSection.model_validate(section), 100) == kept


def test_snapshots_that_do_not_fit_into_the_run_are_refused(tiny):
    with pytest.raises(ValueError, match=r"checkpoint\.snapshots\.last = 5: .*set it to 1 or less"):
        tiny(checkpoint={"snapshots": {}})
