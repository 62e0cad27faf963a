"""torchrun restarts the ranks within the job after one of them was killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from anchorcontext.config import save_config
from anchorcontext.testing import run_distributed
from anchorcontext.train.consolidate import load_consolidated_state_dict
from anchorcontext.train.loop import train
from anchorcontext.watch.jsonl import read_metrics

ROOT = Path(__file__).parents[2]
STEPS = 60


def undisturbed(rank, world_size, config):
    return train(config).step


def run_dir(config):
    return Path(config.run.output_dir) / config.run.name


def ranks_of(launcher):
    """The processes that train, by rank."""
    found = {}
    for child in psutil.Process(launcher.pid).children():
        rank = child.environ().get("RANK")
        if rank is not None:
            found[int(rank)] = child
    return found


@pytest.mark.slow
def test_a_killed_rank_is_started_again_and_changes_nothing(tiny, tmp_path):
    def config(name):
        return tiny(
            run={"name": name},
            parallel={"sp": 2},
            train={"steps": STEPS},
            checkpoint={"every": 3},
        )

    reference, killed = config("reference"), config("killed")
    run_distributed(undisturbed, 2, reference)
    save_config(killed, tmp_path / "config.yaml")
    variables = {"BIN": str(Path(sys.executable).parent), "RANKS": "2", "RESTARTS": "1"}
    launcher = subprocess.Popen(
        [ROOT / "launch" / "torchrun.sh", "train", str(tmp_path / "config.yaml")],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        saved = run_dir(killed) / "checkpoints" / "step-000003"
        while not saved.exists():
            assert launcher.poll() is None, launcher.communicate()[0]
            time.sleep(0.02)
        ranks_of(launcher)[1].send_signal(signal.SIGKILL)
        output, _ = launcher.communicate(timeout=240)
    finally:
        launcher.kill()
    assert launcher.returncode == 0, output
    records, events = read_metrics(run_dir(killed) / "metrics.jsonl")
    starts = [event["step"] for event in events if event["event"] == "start"]
    assert starts[0] == 0 and len(starts) == 2 and starts[1] >= 3, output
    expected, _ = read_metrics(run_dir(reference) / "metrics.jsonl")
    assert [r["loss"] for r in records] == [r["loss"] for r in expected]
    ends = [
        load_consolidated_state_dict(run_dir(c) / "checkpoints" / f"step-{STEPS:06d}")
        for c in (killed, reference)
    ]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[1])
