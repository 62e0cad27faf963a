"""Whole runs: killed and resumed bit for bit, failing as one, every window once an epoch."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from anchorcontext.config import save_config
from anchorcontext.errors import UserError
from anchorcontext.parallel import build_mesh
from anchorcontext.testing import run_distributed
from anchorcontext.train.checkpoint_files import find_checkpoints
from anchorcontext.train.consolidate import load_consolidated_state_dict
from anchorcontext.train.dry_run import dry_run
from anchorcontext.train.job import build_loader, open_dataset
from anchorcontext.train.loop import Trainer, train
from anchorcontext.watch.jsonl import read_metrics

STEPS = 6


def long_run(tiny, name, stage):
    return tiny(
        run={"name": name},
        parallel={"sp": 2},
        train={"steps": STEPS, "zero_stage": stage},
        schedule={"type": "cosine", "warmup_steps": 2},
        checkpoint={"every": 2},
        parity={"at_start": True, "at_end": False},
    )


def run_dir(config):
    return Path(config.run.output_dir) / config.run.name


def undisturbed(rank, world_size, config):
    return train(config).step


def killed_in_backward(rank, world_size, config, step):
    trainer = Trainer(config)

    def kill(module, gradients_in, gradients_out):
        if trainer.step == step and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.job.train_model.causal_lm.get_decoder().layers[0].register_full_backward_hook(kill)
    trainer.run()


def killed_while_saving(rank, world_size, config, step):
    """Everything of the checkpoint is written and synced, the rename is missing."""
    trainer = Trainer(config)

    def die(pending):
        assert pending.step == step
        os.kill(os.getpid(), signal.SIGKILL)

    trainer.checkpoints._complete = die
    trainer.run()


def assert_same_run(config, reference):
    """Every step's loss and norm, and the last weights, bit for bit."""
    records, _ = read_metrics(run_dir(config) / "metrics.jsonl")
    expected, _ = read_metrics(run_dir(reference) / "metrics.jsonl")
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    for record, true in zip(records, expected, strict=True):
        for key in ("loss", "grad_norm", "lr", "windows", "loss_tokens"):
            assert record[key] == true[key], (record["step"], key)
    final = [
        load_consolidated_state_dict(run_dir(c) / "checkpoints" / f"step-{STEPS:06d}")
        for c in (config, reference)
    ]
    assert final[0].keys() == final[1].keys()
    assert all(torch.equal(final[0][name], final[1][name]) for name in final[0])


def test_kills_in_a_step_and_in_a_save_change_nothing_under_zero_3(tiny):
    reference, config = long_run(tiny, "reference", 3), long_run(tiny, "killed", 3)
    run_distributed(undisturbed, 2, reference)
    losses = [r["loss"] for r in read_metrics(run_dir(reference) / "metrics.jsonl")[0]]
    assert losses[-1] < losses[0] - 0.1 and len(set(losses)) == STEPS

    # The parent hears of the kill, or of rank 0's broken connection, whichever comes first.
    with pytest.raises(RuntimeError, match=r"of 2 (failed|ended)"):
        run_distributed(killed_in_backward, 2, config, 3)
    folder = run_dir(config) / "checkpoints"
    assert [c.step for c in find_checkpoints(folder)[0]] == [2]

    with pytest.raises(RuntimeError, match=r"of 2 (failed|ended)"):
        run_distributed(killed_while_saving, 2, config, 4)
    complete, torn = find_checkpoints(folder)
    assert [c.step for c in complete] == [2], "the last good one survives"
    assert len(torn) == 1 and "step-000004.tmp" in torn[0]

    run_distributed(undisturbed, 2, config)
    assert_same_run(config, reference)
    assert sorted(p.name for p in folder.iterdir()) == ["step-000004", "step-000006"]


SCRIPT = """
import os, signal, sys, time
from anchorcontext.config import load_config
from anchorcontext.train import Trainer
from anchorcontext.train.failure import failing_together

what, path = sys.argv[1:]
trainer = Trainer(load_config(path))

def disturb(module, gradients_in, gradients_out):
    if trainer.step == 3 and os.environ["RANK"] == "1":
        print(f"STRUCK {time.time()}", flush=True)
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "raise":
            raise OSError("the disk of rank 1 is gone")

trainer.job.train_model.causal_lm.get_decoder().layers[0].register_full_backward_hook(disturb)
with failing_together():
    trainer.run()
trainer.close()
"""


def torchrun(*arguments):
    """Two ranks under torchrun: status, seconds since the fault struck, output."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        + [str(argument) for argument in arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"},
    )
    ended, struck = time.time(), re.search(r"STRUCK ([\d.]+)", done.stdout)
    return done.returncode, ended - float(struck[1]) if struck else None, done.stdout


@pytest.mark.slow
def test_torchrun_killed_or_failing_ends_at_once_and_resumes_bit_for_bit(tiny, tmp_path):
    reference, config = long_run(tiny, "reference", 1), long_run(tiny, "killed", 1)
    script, path = tmp_path / "disturbed.py", tmp_path / "config.yaml"
    script.write_text(SCRIPT)
    save_config(config, path)
    run_distributed(undisturbed, 2, reference)

    status, seconds, output = torchrun(script, "raise", path)
    errors = re.findall(r"(?m)^(?!torch.distributed.elastic).*Error: .*$", output)
    assert status != 0 and "the disk of rank 1 is gone" in errors[-1], "the cause comes last"
    assert seconds < 60
    folder = run_dir(config) / "checkpoints"
    assert [c.step for c in find_checkpoints(folder)[0]] == [2]

    status, seconds, output = torchrun(script, "kill", path)
    assert status != 0 and "Signal 9" in output
    assert seconds < 60
    assert [c.step for c in find_checkpoints(folder)[0]] == [2]

    status, _, output = torchrun("-m", "anchorcontext", "train", path)
    assert status == 0, output
    assert "resumed from" in output and "step-000002" in output
    assert_same_run(config, reference)


def numbered_windows(rank, world_size, config):
    """The windows each rank trains on in one epoch, by the job's own loader."""
    mesh = build_mesh(config.parallel.sp)
    loader = build_loader(config, open_dataset(config), mesh)
    seen = []
    for _ in range(len(loader.dataset) // (mesh.dp * loader.micro_batch_windows)):
        next(loader)
        seen += loader.last_ids
    return mesh.dp_rank, seen


def test_sp_ranks_share_windows_and_an_epoch_holds_each_once(tiny):
    config = tiny(parallel={"sp": 2})
    ranks = run_distributed(numbered_windows, 4, config)
    groups = {}
    for dp_rank, seen in ranks:
        assert groups.setdefault(dp_rank, seen) == seen
    assert sorted(itertools.chain(*groups.values())) == list(range(8))
    assert groups[0] != sorted(groups[0]), "shuffled"


def dry(rank, world_size, config):
    try:
        return dry_run(config)
    except UserError as error:
        return str(error)


def test_a_dry_run_plans_one_window_and_writes_nothing(tiny):
    config = tiny(parallel={"sp": 2})
    first, second = run_distributed(dry, 2, config)
    assert first == second
    assert (first.dp, first.sp, first.accumulation, first.resumes_at) == (1, 2, 4, 0)
    assert first.window_tokens == 24 and first.tokens_per_rank == 12
    assert len(first.bytes_per_rank) == 2 and sum(first.bytes_per_rank) > 0
    assert not run_dir(config).exists()
    sliding = tiny(
        model={
            "scratch": {"model_type": "mistral", "hidden_size": 32, "num_attention_heads": 4}
            | {"sliding_window": 8}
        }
    )
    (message,) = run_distributed(dry, 1, sliding)
    assert "sliding_window" in message


def bad_token(rank, world_size, config):
    """Rank 1 reads a window with a token id that the model does not have."""
    trainer = Trainer(config)
    if rank == 1:
        own = type(trainer.job.loader).__next__

        class Broken(type(trainer.job.loader)):
            def __next__(self):
                windows = own(self)
                windows[0].input_ids.setflags(write=True)
                windows[0].input_ids[5] = 4242
                return windows

        trainer.job.loader.__class__ = Broken
    try:
        trainer.run()
    except UserError as error:
        return str(error)
    return None


def test_a_bad_token_on_one_rank_stops_all_before_any_collective(tiny):
    messages = run_distributed(bad_token, 2, tiny(parallel={"sp": 2}))
    assert messages[0] == messages[1]
    assert "rank 1: window" in messages[0] and "token id 4242" in messages[0]


def diverge(rank, world_size, config):
    trainer = Trainer(config)
    with torch.no_grad():
        for parameter in trainer.job.train_model.parameters():
            parameter.fill_(float("nan"))
    try:
        trainer.run()
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return None


def test_nan_stops_every_rank_with_the_windows_named(tiny):
    config = tiny(
        train={"zero_stage": 1},
        parallel={"sp": 2},
        checkpoint={"every": 1},
        guards={"max_skipped": 1},
    )
    first, second = run_distributed(diverge, 2, config)
    assert first == second
    name, message = first
    assert name == "DivergedError"
    record = json.loads((run_dir(config) / "metrics.jsonl").read_text().splitlines()[1])
    assert record["skipped"] and record["skip_reason"] == "gradient not finite"
    assert f"windows {record['windows']}" in message and len(record["windows"]) == 4
    assert "Loss not finite on ranks [0, 1]" in message
    assert find_checkpoints(run_dir(config) / "checkpoints") == ([], [])


def ring_flash_attn_run(rank, world_size, config):
    """A run whose flash-attn computes on CPU tensors."""
    from anchorcontext.testing.flash_attn_cpu import install_flash_attn_cpu

    install_flash_attn_cpu()
    return train(config).step


def test_ring_flash_attn_trains_as_the_native_backend_does(tiny):
    def config(name, **attention):
        return tiny(
            run={"name": name},
            attention={"mode": "intra_doc", **attention},
            parallel={"sp": 2},
            train={"steps": 3},
            parity={"at_start": True, "at_end": True},
        )

    native = config("native")
    package = config("package", backend="ring_flash_attn")
    run_distributed(undisturbed, 2, native)
    run_distributed(ring_flash_attn_run, 2, package)
    records = [read_metrics(run_dir(c) / "metrics.jsonl")[0] for c in (native, package)]
    assert [r["step"] for r in records[1]] == [1, 2, 3]
    for expected, found in zip(*records, strict=True):
        for key in ("loss", "grad_norm"):
            assert found[key] == pytest.approx(expected[key], rel=1e-5)
        assert found["bytes_sent"] > expected["bytes_sent"] > 0


def test_ring_flash_attn_without_flash_attn_is_refused_on_every_rank(tiny):
    config = tiny(attention={"mode": "intra_doc", "backend": "ring_flash_attn"}, parallel={"sp": 2})
    with pytest.raises(RuntimeError, match="flash_attn is not installed; pip install"):
        run_distributed(undisturbed, 2, config)
