"""From the launcher's environment variables to a process group and a device.

Understands torchrun and the deepspeed launcher (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``), srun
(``SLURM_PROCID`` of a job step) and no launcher at all (a world of one).
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from ..errors import UserError
from .control import Control

# A rank that fails takes its peers along through the launcher, or through the broken connection,
# at once. The timeout ends what is left: a rank that hangs without failing.
GROUP_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class LaunchEnvironment:
    """Who this process is: ranks, the rendezvous, and the launcher that said so."""

    rank: int
    world_size: int
    local_rank: int
    launcher: str
    master_addr: str = "127.0.0.1"
    master_port: int = 29500

    def variables(self) -> dict[str, str]:
        """The variables that torch and DeepSpeed read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


@dataclass(frozen=True)
class Process:
    """This rank's place in the job: its launcher, its device, and how it talks to the others."""

    launch: LaunchEnvironment
    device: torch.device
    control: Control
    owns_group: bool
    """Whether ``start_process`` made the process group; otherwise somebody else ends it."""

    def close(self) -> None:
        """Leave the process group."""
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()

    @property
    def rank(self) -> int:
        return self.launch.rank

    @property
    def world_size(self) -> int:
        return self.launch.world_size


def read_launch_environment(environ: Mapping[str, str]) -> LaunchEnvironment:
    """What the launcher's variables say; a world of one when there is no launcher.

    Raises:
        UserError: the variables contradict each other or are incomplete.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        launch = _from_torch(environ)
    elif "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:
        launch = _from_slurm(environ)
    else:
        return LaunchEnvironment(0, 1, 0, launcher="none")
    if not 0 <= launch.rank < launch.world_size:
        raise UserError(
            f"the launcher set rank {launch.rank} in a world of {launch.world_size}: a rank lies "
            f"in 0..{launch.world_size - 1}; unset RANK and WORLD_SIZE, or start with torchrun"
        )
    return launch


def start_process(timeout: timedelta = GROUP_TIMEOUT) -> Process:
    """Join the job: process group (NCCL on GPUs, gloo on CPUs), device, control group.

    A process group that exists already is used as it is. In a world of one nothing listens on a
    port.
    """
    launch = read_launch_environment(os.environ)
    use_cuda = torch.cuda.is_available()
    device = torch.device("cpu")
    if use_cuda:
        # DeepSpeed takes LOCAL_RANK for the device's number, too.
        on_node = os.environ.get("SLURM_GPUS_ON_NODE")
        index = gpu_index(launch, torch.cuda.device_count(), int(on_node) if on_node else None)
        launch = replace(launch, local_rank=index)
        device = torch.device("cuda", launch.local_rank)
        torch.cuda.set_device(device)
    tell_deepspeed_the_accelerator()
    os.environ.update(launch.variables())
    owns_group = not dist.is_initialized()
    if owns_group:
        backend = "nccl" if use_cuda else "gloo"
        if launch.world_size == 1:
            dist.init_process_group(
                backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
            )
        else:
            # With its device named, NCCL connects here and not in the first collective, groups are
            # split off this communicator, and single messages need none of their own.
            bound = device if use_cuda else None
            dist.init_process_group(backend, timeout=timeout, device_id=bound)
    logging.getLogger(__name__).debug("rank %d of %d", launch.rank, launch.world_size)
    return Process(launch, device, Control.create(), owns_group)


def gpu_index(launch: LaunchEnvironment, visible: int, on_node: int | None = None) -> int:
    """Which of the ``visible`` GPUs is this process's.

    Args:
        on_node: GPUs that SLURM gave the job on this host, where it says so.

    Raises:
        UserError: there are fewer of them than processes on this host.
    """
    there = visible
    if launch.launcher == "srun" and visible == 1:
        # srun --gpus-per-task=1 shows each task its own one.
        if on_node is None or launch.local_rank < on_node:
            return 0
        there = on_node
    if launch.local_rank >= there:
        raise UserError(
            f"local rank {launch.local_rank} has no GPU: this host shows {there}; start one "
            "process per GPU (torchrun --nproc-per-node, srun --ntasks-per-node)"
        )
    return launch.local_rank


def tell_deepspeed_the_accelerator() -> None:
    """Before DeepSpeed is imported: without a GPU it searches for one and warns on every rank."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def first_host(nodelist: str) -> str:
    """The first host of a SLURM node list: ``n[07-09,12],m1`` -> ``n07``."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\])?([^,\[]*)", nodelist)
    if match is None:
        raise UserError(f"cannot read the SLURM node list {nodelist!r}; set MASTER_ADDR by hand")
    prefix, ranges, suffix = match.groups()
    first = re.split(r"[,-]", ranges)[0] if ranges else ""
    return f"{prefix}{first}{suffix}"


def _from_torch(environ: Mapping[str, str]) -> LaunchEnvironment:
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name not in environ]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} not set: a launcher sets RANK, WORLD_SIZE and LOCAL_RANK "
            "together; start with torchrun, deepspeed or srun, or unset them all for one process"
        )
    return LaunchEnvironment(
        rank=_integer(environ, "RANK"),
        world_size=_integer(environ, "WORLD_SIZE"),
        local_rank=_integer(environ, "LOCAL_RANK"),
        launcher="torchrun" if "TORCHELASTIC_RUN_ID" in environ else "torch",
        master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=int(environ.get("MASTER_PORT", "29500")),
    )


def _from_slurm(environ: Mapping[str, str]) -> LaunchEnvironment:
    nodelist = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    # One port per job, outside the range that Linux hands out to clients (32768 and above).
    port = 20000 + int(environ.get("SLURM_JOB_ID", "0")) % 10000
    return LaunchEnvironment(
        rank=_integer(environ, "SLURM_PROCID"),
        world_size=_integer(environ, "SLURM_STEP_NUM_TASKS"),
        local_rank=_integer(environ, "SLURM_LOCALID"),
        launcher="srun",
        master_addr=environ.get("MASTER_ADDR") or first_host(nodelist),
        master_port=int(environ.get("MASTER_PORT", port)),
    )


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        raise UserError(
            f"{name}={environ.get(name)!r}: the launcher must set it to an integer"
        ) from None
