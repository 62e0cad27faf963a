"""Before the first step: does what the run needs fit the disk and the devices it was given?

Called by ``anchorcontext train`` between opening the data and building the model.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
import uuid
from pathlib import Path

import psutil
import torch

from ..config import Config
from ..data import WindowDataset
from ..hardware import load_hardware
from ..model import build_config
from ..parallel import Mesh
from ..train.job import run_folder
from ..train.launch import Process
from ..train.preflight import Ranks
from ..watch.sizes import ModelSizes, model_sizes
from .memory import FP32, MemoryEstimate
from .report import micro_batch_memory

logger = logging.getLogger(__name__)

GIB = 2**30
SEEN_WITHIN_SECONDS = 5.0
"""A network file system may show another host's new file a little later."""


def check_resources(config: Config, process: Process, mesh: Mesh, dataset: WindowDataset) -> None:
    """The run folder can be written, is one folder for all, and has room; the model has memory.

    Activations that may not fit are a warning: their estimate is a model. Weights, gradients and
    optimiser are counted, so a device that cannot hold them is an error.

    Raises:
        UserError: names what is missing, the ranks and their hosts; on every rank the same.
    """
    ranks = Ranks(process.control)
    with process.control.together("estimating what the run needs"):
        model = build_config(
            config.model, window_tokens=config.longest_position, vocab_size=dataset.vocab_size
        )
        sizes = model_sizes(model)
        memory = _memory(config, process, dataset, sizes)
    check_run_folder(config, ranks)
    check_disk(config, ranks, checkpoint_bytes(config, sizes))
    check_memory(memory, available_memory(process.device, ranks), ranks)


def checkpoint_bytes(config: Config, sizes: ModelSizes) -> int:
    """Bytes of one checkpoint: weights, fp32 masters, the optimiser's moments."""
    stage, bf16 = config.train.zero_stage, config.model.dtype == "bf16"
    weight = 2 if bf16 else FP32
    master = 0 if stage == 0 and not bf16 else FP32
    moments = 2 * FP32 if config.optimizer.type == "adamw" else 0
    return sizes.parameters * (weight + master + moments)


def check_run_folder(config: Config, ranks: Ranks) -> None:
    """Every rank can write the run folder, and all of them mean the same one.

    Raises:
        UserError: names the ranks that cannot, or that see another folder than rank 0.
    """
    control, folder = ranks.control, run_folder(config)
    token = control.from_first(uuid.uuid4().hex)
    probe, first = (folder / f".preflight-{token}-{rank}" for rank in (control.rank, 0))
    problem = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
    except OSError as error:
        problem = f"{folder} cannot be written ({error.strerror})"
    try:
        ranks.refuse(problem, "set run.output_dir to a folder that all ranks can write")
        alien = None if _appears(first) else f"{folder} is not the folder that rank 0 writes"
        ranks.refuse(alien, "set run.output_dir to a folder that all hosts share")
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)


def check_disk(config: Config, ranks: Ranks, size: int) -> None:
    """There is room for two checkpoints, those of this run that exist counted.

    Raises:
        UserError: names what is free and what is needed.
    """
    section, folder = config.checkpoint, run_folder(config)
    if not (section.every or section.keep_every or section.snapshots or section.final):
        return
    problem = None
    if ranks.control.rank == 0:
        missing = max(1, 2 - len(list((folder / "checkpoints").glob("step-*[0-9]"))))
        free = shutil.disk_usage(folder).free
        if free < missing * size:
            more = "1 more checkpoint needs" if missing == 1 else "2 more checkpoints need"
            problem = f"{folder} has {_gib(free)} free, {more} {_gib(missing * size)}"
    ranks.refuse(problem, "make room, or set run.output_dir to a larger disk")


def check_memory(memory: MemoryEstimate, available: int, ranks: Ranks) -> None:
    """The device holds weights, gradients and optimiser; warn where the peak may be too high.

    Args:
        available: bytes of this rank.

    Raises:
        UserError: names the ranks whose device is too small.
    """
    always, peak = memory.states.always, memory.peak
    short = (
        f"weights, gradients and optimiser need {_gib(always)}, {_gib(available)} are free"
        if always > available
        else None
    )
    ranks.refuse(
        short,
        "raise train.zero_stage, start more ranks, or end what else uses the memory; "
        "`anchorcontext plan` shows what needs it",
    )
    tight = ranks.control.gather(peak > available)
    if any(tight) and ranks.control.rank == 0:
        names = ranks.name([rank for rank, is_tight in enumerate(tight) if is_tight])
        logger.warning(
            "%s may run out of memory: the plan's peak is %s, %s are free on rank 0; "
            "`anchorcontext plan` shows what needs it",
            names,
            _gib(peak),
            _gib(available),
        )


def available_memory(device: torch.device, ranks: Ranks) -> int:
    """Bytes that this rank may still take: of its GPU, or its share of the host's memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    limit, used = (_number(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit is not None and used is not None:
        free = min(free, limit - used)
    host = ranks.hosts[ranks.control.rank]
    return max(free, 0) // ranks.hosts.count(host)


def _memory(
    config: Config, process: Process, dataset: WindowDataset, sizes: ModelSizes
) -> MemoryEstimate:
    hardware = load_hardware(config.parallel.hardware if process.device.type == "cuda" else "cpu")
    count = min(config.train.micro_batch_windows, len(dataset))
    windows = [dataset[i].window("full", config.loss.boundary) for i in range(count)]
    return micro_batch_memory(config, sizes, hardware, process.world_size, windows)


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + SEEN_WITHIN_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= GIB or not size else f"{size / 2**20:,.1f} MiB"
