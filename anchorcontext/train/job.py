"""Everything a run needs before its first step, on every rank: ranks, data, model, engine.

``Trainer`` and ``anchorcontext parity`` start from the same job, so what is checked is what trains.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..config import Config
from ..data import Loader, WindowDataset, configured_view
from ..data.agreement import check_prepared
from ..errors import UserError
from ..hardware import load_hardware
from ..model import TrainModel, build_model, check_liger, verify_rope
from ..parallel import Mesh, build_mesh
from ..parallel.ring_flash_attn import check_installed
from ..plan.cache import PLANS
from ..watch.sizes import sizes_of
from ..window import Window
from .costs import cost_model, plan_options
from .engine import build_engine
from .launch import start_process
from .partition import partition_model
from .preflight import (
    Preflight,
    Ranks,
    check_links,
    check_same_data,
    check_same_setup,
    warn_of_spread_groups,
)
from .seeds import seed_everything, use_deterministic_operators

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

MOST_AHEAD = 8
"""Micro-batches of the next step that are read and planned while a step computes."""


class Job:
    """The parts of a run in the order in which they depend on each other; collective.

    Args:
        preflight: further checks between the data and the model.

    Raises:
        UserError: config, data, model or ranks do not fit together; on every rank alike.
    """

    def __init__(self, config: Config, preflight: Preflight | None = None) -> None:
        self.config = config
        if config.train.deterministic:
            use_deterministic_operators()
        self.process = start_process()
        self.control = self.process.control
        self.device = self.process.device
        check_same_setup(config, self.control)
        with self.control.together("checking the config"):
            self.shape = config.check_world(self.process.world_size)
            hardware = load_hardware(config.parallel.hardware)
            if config.attention.backend != "native":
                check_installed()
        self.mesh = build_mesh(config.parallel.sp)
        seed_everything(config.run.seed)
        with self.control.together("opening the data"):
            self.dataset = open_dataset(config)
            self.loader = build_loader(config, self.dataset, self.mesh)
        check_same_data(self.dataset, self.control)
        warn_of_spread_groups(Ranks(self.control), self.mesh.sp)
        check_links(self.process, self.mesh)
        if preflight is not None:
            preflight(config, self.process, self.mesh, self.dataset)
        with self.control.together("building the model"):
            model = self._build_model()
        if config.train.partitioned_init:
            partition_model(model, config, self.process)
        loss = config.loss
        self.train_model = TrainModel(model, loss.chunk_tokens, loss.kernel).to(self.device)
        self.cost = cost_model(config, sizes_of(model), hardware)
        ahead = min(self.shape.accumulation, MOST_AHEAD)
        PLANS.reserve(self.shape.accumulation + ahead)
        self.loader.prefetch(ahead, self._plan_ahead)
        self.engine: DeepSpeedEngine = build_engine(self.train_model, config, self.device)
        with self.control.together("checking RoPE after DeepSpeed's casts"):
            verify_rope(self.train_model.causal_lm)

    @property
    def run_dir(self) -> Path:
        """The folder of the run."""
        return run_folder(self.config)

    def next_micro_batches(self) -> list[list[Window]]:
        """This rank's windows of the next optimiser step, one list a micro-batch.

        Raises:
            UserError: on every rank, when one of them cannot read its windows or they do not fit
                the model.
        """
        with self.control.together("reading the next windows"):
            return [self._checked(next(self.loader)) for _ in range(self.shape.accumulation)]

    def peek_micro_batches(self, count: int = 1) -> list[list[Window]]:
        """The windows of the next ``count`` micro-batches; the step after gets them again."""
        state = self.loader.state_dict()
        with self.control.together("reading the next windows"):
            windows = [self._checked(next(self.loader)) for _ in range(count)]
        self.loader.load_state_dict(state)
        return windows

    def close(self) -> None:
        """End the loader, release the engine and leave the process group."""
        self.loader.close()
        self.engine.destroy()
        self.process.close()

    def _plan_ahead(self, windows: list[Window]) -> None:
        """Plan a coming micro-batch; ``make_plan`` then finds it. NumPy only: runs in a thread."""
        options = plan_options(self.config.attention, self.cost)
        PLANS.plan(windows, self.mesh.sp, **options).rank(self.mesh.sp_rank)

    def _build_model(self) -> PreTrainedModel:
        if self.config.loss.kernel == "liger":
            check_liger(self.device)
        elsewhere = self.config.train.partitioned_init and self.process.rank != 0
        return build_model(
            self.config.model,
            window_tokens=self.config.longest_position,
            seed=self.config.run.seed,
            vocab_size=self.dataset.vocab_size,
            precision=self.config.attention.precision,
            skeleton=elsewhere,
        )

    def _checked(self, windows: list[Window]) -> list[Window]:
        """A token id outside the vocabulary would read foreign memory on a GPU, or hang it."""
        vocab_size = self.train_model.causal_lm.config.vocab_size
        for index, window in zip(self.loader.last_ids, windows, strict=True):
            low, high = int(window.input_ids.min()), int(window.input_ids.max())
            if low < 0 or high >= vocab_size:
                raise UserError(
                    f"window {index} of {self.dataset.path} holds token id "
                    f"{low if low < 0 else high}: the model knows the ids 0..{vocab_size - 1}; "
                    "prepare the data with the model's tokenizer"
                )
        return windows


def run_folder(config: Config) -> Path:
    """Where a run lives."""
    return Path(config.run.output_dir) / config.run.name


def open_dataset(config: Config) -> WindowDataset:
    """The prepared windows of the config.

    Raises:
        UserError: there are none, or they were prepared differently than the config says.
    """
    dataset = WindowDataset(config.data.path)
    check_prepared(dataset, config)
    if dataset.window_tokens != config.data.window_tokens:
        raise UserError(
            f"data.window_tokens = {config.data.window_tokens}, but {dataset.path} was prepared "
            f"with {dataset.window_tokens}; run `anchorcontext prepare CONFIG --force`, or set "
            f"data.window_tokens={dataset.window_tokens}"
        )
    return dataset


def build_loader(config: Config, dataset: WindowDataset, mesh: Mesh) -> Loader:
    """The windows of this rank, in the order of the seed.

    Raises:
        UserError: the config asks for an anchor that the windows do not have.
    """
    section = config.train
    if mesh.rank == 0 and len(dataset) < section.windows_per_step:
        logger.warning(
            "%s holds %d windows, train.windows_per_step is %d: a step trains on some of them more "
            "than once; prepare more data, or lower windows_per_step",
            *(dataset.path, len(dataset), section.windows_per_step),
        )
    return Loader(
        dataset,
        view=configured_view(config, dataset),
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp,
        micro_batch_windows=section.micro_batch_windows,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
    )


def peak_dtype(config: Config) -> torch.dtype:
    """The dtype of the model's matrix products."""
    return torch.bfloat16 if config.model.dtype == "bf16" else torch.float32
