"""``run``, ``optimizer``, ``schedule``, ``train``, ``checkpoint`` and ``guards``: the run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from anchorcontext.config.base import Section
from anchorcontext.config.sections.types import (
    Beta,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Ratio,
    Text,
)


def _folder_name(name: str) -> str:
    if name in (".", "..") or "/" in name or "\\" in name:
        raise ValueError("is the name of a folder inside run.output_dir; leave out slashes")
    return name


class RunSection(Section):
    """Which run this is and where it lives: the folder ``output_dir/name``."""

    name: Annotated[Text, AfterValidator(_folder_name)]
    """Name of the run; without it, the name of the config file without its ending."""

    output_dir: Text = "runs"
    """Folder that holds the runs, relative to the working directory."""

    seed: NonNegativeInt = 0
    """Seed of the initial weights and of the order of the windows."""


class OptimizerSection(Section):
    """The optimiser; the defaults are the paper's."""

    type: Literal["adamw", "sgd"] = "adamw"
    """``adamw``, or plain ``sgd`` (which shows a wrong gradient scale that Adam would hide)."""

    lr: NonNegativeFloat = 2e-5
    """Peak learning rate."""

    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)
    """Adam's decay rates."""

    eps: PositiveFloat = 1e-8
    """Adam's denominator floor."""

    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay."""


class ScheduleSection(Section):
    """The learning rate over the steps."""

    type: Literal["constant", "cosine"] = "constant"
    """``constant``, or ``cosine`` down to ``min_lr_ratio`` at the last step."""

    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up."""

    min_lr_ratio: Ratio = 0.1
    """Last learning rate of ``cosine`` divided by ``optimizer.lr``."""


class TrainSection(Section):
    """The training loop."""

    steps: PositiveInt
    """Optimiser steps of the whole run."""

    windows_per_step: PositiveInt
    """Windows of one optimiser step over all ranks; accumulation follows from it."""

    micro_batch_windows: PositiveInt = 1
    """Windows that one SP group computes at a time."""

    clip_norm: PositiveFloat | None = 1.0
    """Largest global gradient norm; null does not clip."""

    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    """DeepSpeed ZeRO stage: 1 shards optimiser state, 2 also gradients, 3 also parameters."""

    partitioned_init: bool = False
    """ZeRO-3: rank 0 alone loads the model, on its host, and hands each rank its part parameter by
    parameter; false loads it on every rank."""

    offload_optimizer: Literal["none", "cpu"] = "none"
    """``cpu``: master weights and optimiser state stay in the host's memory, and are updated there;
    from ``zero_stage`` 1 on."""

    deterministic: bool = False
    """Only operators that give the same bits in every run; on CPUs they always do, on GPUs it may
    cost time, and an operator without such a form is an error."""

    log_every: PositiveInt = 1
    """Steps between two lines of metrics."""


class SnapshotsSection(Section):
    """The checkpoints at the end whose scores are averaged; the defaults are the paper's."""

    last: PositiveInt = 5
    """Number of checkpoints."""

    apart: PositiveInt = 10
    """Steps between two of them; the last one is that of the last step."""


class CheckpointSection(Section):
    """When checkpoints are written and which are kept."""

    every: PositiveInt | None = None
    """Steps between checkpoints; null writes none but those that other keys here ask for."""

    keep: PositiveInt = 2
    """Newest checkpoints kept."""

    keep_every: PositiveInt | None = None
    """Steps between checkpoints that are kept for good; null keeps none."""

    snapshots: SnapshotsSection | None = None
    """Checkpoints at equal distances up to the last step, kept for good: ``{last: 5, apart: 10}``;
    null keeps none."""

    final: bool = True
    """Write one after the last step."""

    background: bool = False
    """Write in a thread while training goes on, from a copy of the state in the host's memory."""

    failures: PositiveInt = 3
    """Saves that fail in a row (a full disk) before the run stops; a final one stops it at once."""


class SpikeSection(Section):
    """A value that jumps over what it was."""

    factor: Annotated[float, Field(gt=1)]
    """Times the median of the recent steps."""

    action: Literal["log", "skip", "stop"] = "log"
    """``log`` it; ``skip`` the step, so that it is not applied; ``stop`` the run."""


class GuardsSection(Section):
    """What happens when a step goes wrong. What the step was made of goes to ``RUN/guards``."""

    max_skipped: PositiveInt = 3
    """Steps in a row with a loss or gradient that is not finite before the run stops; such a step
    is never applied."""

    loss_spike: SpikeSection | None = None
    """A loss far above the recent ones; null does not look."""

    gradient_spike: SpikeSection | None = None
    """A gradient norm, before clipping, far above the recent ones; null does not look."""

    recent: PositiveInt = 50
    """Steps whose median a spike is measured by."""

    slow_step: Annotated[float, Field(gt=1)] | None = 10.0
    """Write the stacks of all threads when a step takes this times the median step, and 20 s; null
    never does."""
