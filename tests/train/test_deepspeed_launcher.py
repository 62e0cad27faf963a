"""``launch/deepspeed.sh`` on a hostfile of two hosts, both of them this machine.

What differs from a cluster: with pdsh, ``ssh`` is a script that runs the command here. Everything
else is real: the hostfile, pdsh, the launcher on each "host", the environment that it hands on.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from anchorcontext.config import save_config
from anchorcontext.testing import run_distributed
from anchorcontext.testing.distributed import free_port
from anchorcontext.train.loop import train

ROOT = Path(__file__).parents[2]
# Options of ssh come first, then the host, then the command; -l and -o may stand apart from values.
SSH = """#!/bin/bash
while [[ $1 == -* ]]; do
    case $1 in -o | -l | -p) shift ;; esac
    shift
done
echo "$1" >> "$SSH_LOG"
shift
exec env -i PATH="$PATH" HOME="$HOME" bash -c "$*"
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def undisturbed(rank, world_size, config):
    return train(config).last_loss


def start(config, folder, **variables):
    """The script in the background, with further environment variables."""
    arguments = ["train", str(folder / "config.yaml"), "--json", str(folder / "report.json")]
    environment = {
        **os.environ,
        "HOSTFILE": str(folder / "hosts"),
        "BIN": str(Path(sys.executable).parent),
        "GLOO_SOCKET_IFNAME": "lo",
        **variables,
    }
    return subprocess.Popen(
        [ROOT / "launch" / "deepspeed.sh", *arguments],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def job(tiny, tmp_path):
    """A config for two ranks, its hostfile, and the loss it has to reach."""
    config = tiny(parallel={"sp": 2}, train={"steps": 2}, run={"name": "launched"})
    reference = tiny(parallel={"sp": 2}, train={"steps": 2}, run={"name": "reference"})
    save_config(config, tmp_path / "config.yaml")
    (tmp_path / "hosts").write_text("n1 slots=1\nn2 slots=1\n")
    return config, run_distributed(undisturbed, 2, reference)[0]


def assert_trained(folder, loss, output):
    assert (folder / "report.json").exists(), output
    report = json.loads((folder / "report.json").read_text())
    assert (report["world_size"], report["step"], report["last_loss"]) == (2, 2, loss), output


def test_each_host_started_by_itself(job, tmp_path):
    config, loss = job
    master = f"127.0.0.1:{free_port()}"
    nodes = [start(config, tmp_path, NODE=str(node), MASTER=master) for node in (0, 1)]
    output = "\n".join(node.communicate(timeout=300)[0] for node in nodes)
    assert [node.returncode for node in nodes] == [0, 0], output
    assert_trained(tmp_path, loss, output)


@pytest.mark.skipif(shutil.which("pdsh") is None, reason="pdsh is not installed")
def test_all_hosts_of_the_hostfile_over_pdsh(job, tmp_path):
    config, loss = job
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    launched = start(
        config,
        tmp_path,
        MASTER=f"127.0.0.1:{free_port()}",
        PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        SSH_LOG=str(tmp_path / "ssh.log"),
        WANDB_API_KEY="not-to-be-told",
        TORCH_FR_BUFFER_SIZE="1234",
    )
    output, _ = launched.communicate(timeout=300)
    assert launched.returncode == 0, output
    assert_trained(tmp_path, loss, output)
    assert {"n1", "n2"} <= set((tmp_path / "ssh.log").read_text().split())
    assert "export TORCH_FR_BUFFER_SIZE=1234" in output and "not-to-be-told" not in output
