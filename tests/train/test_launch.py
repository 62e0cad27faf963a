"""What each launcher's variables mean, and what is refused."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from anchorcontext.errors import UserError
from anchorcontext.train.launch import (
    LaunchEnvironment,
    first_host,
    gpu_index,
    read_launch_environment,
    start_process,
)


def test_no_launcher_is_a_world_of_one():
    launch = read_launch_environment({"PATH": "/bin"})
    assert (launch.rank, launch.world_size, launch.local_rank) == (0, 1, 0)


def test_torchrun_and_deepspeed_variables():
    launch = read_launch_environment(
        {
            "RANK": "5",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "1",
            "MASTER_ADDR": "node0",
            "MASTER_PORT": "1234",
        }
    )
    assert (launch.rank, launch.world_size, launch.local_rank) == (5, 8, 1)
    assert launch.variables()["MASTER_ADDR"] == "node0"


def test_srun_variables_find_the_rendezvous_in_the_first_host():
    launch = read_launch_environment(
        {
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": "3",
            "SLURM_LOCALID": "1",
            "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_NTASKS": "64",
            "SLURM_STEP_NODELIST": "gpu[07-08]",
            "SLURM_JOB_ID": "123456",
        }
    )
    assert (launch.rank, launch.world_size, launch.local_rank) == (3, 4, 1)
    assert (launch.master_addr, launch.master_port) == ("gpu07", 23456)


def test_a_batch_script_without_srun_is_a_world_of_one():
    # sbatch sets SLURM_PROCID and SLURM_NTASKS for the script itself; nobody else would come.
    launch = read_launch_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"})
    assert launch.world_size == 1


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("n1", "n1"), ("n[1-4]", "n1"), ("n[03,07-09]-ib,m2", "n03-ib"), ("a,b", "a")],
)
def test_first_host(nodelist, host):
    assert first_host(nodelist) == host


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK"),
        ({"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK='x'"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "rank 2"),
    ],
)
def test_incomplete_variables_are_named(environ, named):
    with pytest.raises(UserError, match=named):
        read_launch_environment(environ)


def test_a_process_takes_its_own_gpu():
    assert gpu_index(LaunchEnvironment(5, 8, 1, "torchrun"), visible=4) == 1
    # srun --gpus-per-task=1: every task sees one, its own.
    assert gpu_index(LaunchEnvironment(5, 8, 1, "srun"), visible=1) == 0
    assert gpu_index(LaunchEnvironment(5, 8, 1, "srun"), visible=1, on_node=2) == 0
    with pytest.raises(UserError, match="local rank 1 has no GPU: this host shows 1;"):
        gpu_index(LaunchEnvironment(5, 8, 1, "srun"), visible=1, on_node=1)
    for launcher, local_rank, visible in (("torchrun", 1, 1), ("srun", 4, 4)):
        with pytest.raises(UserError, match=rf"local rank {local_rank} has no GPU: .* {visible};"):
            gpu_index(LaunchEnvironment(5, 8, local_rank, launcher), visible)


def start_on_gpus(monkeypatch, visible, **environment):
    """A process on a host that shows ``visible`` GPUs, and what it set up, in order."""
    calls = []
    monkeypatch.setattr(os, "environ", {name: str(value) for name, value in environment.items()})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set", device)))
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **given: calls.append((backend, given))
    )
    return start_process(), calls


def test_nccl_is_told_the_device_before_anything_is_allocated(monkeypatch):
    process, calls = start_on_gpus(monkeypatch, visible=4, RANK=5, WORLD_SIZE=8, LOCAL_RANK=1)
    (_, chosen), (backend, given) = calls
    assert process.device == chosen == given["device_id"] == torch.device("cuda", 1)
    assert backend == "nccl"


def test_deepspeed_takes_the_same_gpu_where_a_task_sees_its_own_only(monkeypatch):
    slurm = {"STEP_ID": 0, "PROCID": 5, "LOCALID": 1, "STEP_NUM_TASKS": 8, "JOB_NODELIST": "n[1-2]"}
    given = {f"SLURM_{name}": value for name, value in slurm.items()}
    process, _ = start_on_gpus(monkeypatch, visible=1, **given)
    assert process.device == torch.device("cuda", 0)
    assert (os.environ["RANK"], os.environ["LOCAL_RANK"]) == ("5", "0")


@pytest.mark.parametrize(("visible", "ranks"), [("3,5", 2), ("", 1), (None, 4)])
def test_torchrun_starts_a_rank_for_each_gpu_that_is_not_hidden(tmp_path, visible, ranks):
    scripts = {"nvidia-smi": "printf 'GPU %s\\n' 0 1 2 3", "torchrun": 'echo "$@"'}
    for name, line in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    script = Path(__file__).parents[2] / "launch" / "torchrun.sh"
    command = ["bash", script, "train", "config.yaml"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert f"--nproc-per-node {ranks} " in said.stdout
