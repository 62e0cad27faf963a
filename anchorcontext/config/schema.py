"""The whole config, and what it becomes on a given number of ranks."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from pydantic import Field, model_validator

from anchorcontext.config import sections
from anchorcontext.config.base import BrokenRules, Problem, Section
from anchorcontext.config.deepspeed import undecided_options
from anchorcontext.config.rules import broken_rules
from anchorcontext.errors import UserError


@dataclass(frozen=True)
class WorldShape:
    """How ``dp * sp`` ranks make one optimiser step of ``windows_per_step`` windows."""

    dp: int
    sp: int
    accumulation: int


class Config(Section):
    """One YAML file: the run, its model, its data and everything the commands need."""

    run: sections.RunSection
    """Which run this is and where it lives."""

    model: sections.ModelSection
    """The model."""

    data: sections.DataSection
    """From documents to packed windows."""

    attention: sections.AttentionSection = Field(default_factory=sections.AttentionSection)
    """Who sees whom, and how attention runs across ranks."""

    positions: sections.PositionsSection = Field(default_factory=sections.PositionsSection)
    """RoPE positions, varied for experiments."""

    parallel: sections.ParallelSection = Field(default_factory=sections.ParallelSection)
    """How ranks share the work."""

    loss: sections.LossSection = Field(default_factory=sections.LossSection)
    """Cross-entropy over the valid targets of the whole step."""

    optimizer: sections.OptimizerSection = Field(default_factory=sections.OptimizerSection)
    """The optimiser."""

    schedule: sections.ScheduleSection = Field(default_factory=sections.ScheduleSection)
    """The learning rate over the steps."""

    train: sections.TrainSection
    """The training loop."""

    checkpoint: sections.CheckpointSection = Field(default_factory=sections.CheckpointSection)
    """When checkpoints are written and which are kept."""

    guards: sections.GuardsSection = Field(default_factory=sections.GuardsSection)
    """What happens when a step goes wrong."""

    evaluate: sections.EvaluateSection = Field(default_factory=sections.EvaluateSection)
    """What is measured while training."""

    parity: sections.ParitySection = Field(default_factory=sections.ParitySection)
    """The distributed run against a single device."""

    watch: sections.WatchSection = Field(default_factory=sections.WatchSection)
    """What is shown and recorded while training."""

    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """Any DeepSpeed option; one that contradicts a key above is an error."""

    @model_validator(mode="after")
    def _rules_between_keys(self) -> Config:
        problems = broken_rules(self)
        if problems:
            raise BrokenRules(problems)
        return self

    def check_world(self, world_size: int) -> WorldShape:
        """How ``world_size`` ranks split into dp x sp and how often gradients accumulate.

        Raises:
            UserError: sp does not divide the world, or a step's windows do not divide over dp x
                micro-batch; the message names the nearest values that do.
        """
        sp, train = self.parallel.sp, self.train
        if world_size % sp:
            divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
            problem = Problem(
                "parallel.sp",
                sp,
                f"must divide the number of ranks, {world_size}",
                f"set parallel.sp={_nearest(sp, divisors)} or start "
                f"{_multiples_around(world_size, sp)} ranks",
            )
            raise UserError(str(problem))
        dp = world_size // sp
        at_a_time = dp * train.micro_batch_windows
        if train.windows_per_step % at_a_time:
            problem = Problem(
                "train.windows_per_step",
                train.windows_per_step,
                f"must be a multiple of {at_a_time} = dp {dp} x train.micro_batch_windows "
                f"{train.micro_batch_windows} (dp = {world_size} ranks / parallel.sp {sp})",
                f"set it to {_multiples_around(train.windows_per_step, at_a_time)}",
            )
            raise UserError(str(problem))
        return WorldShape(dp=dp, sp=sp, accumulation=train.windows_per_step // at_a_time)

    @property
    def longest_position(self) -> int:
        """How many positions the model must reach: the largest one of a window, and 1."""
        window = self.positions.offset + self.data.window_tokens
        return max(window, self.attention.anchor.position + 1)

    def deepspeed_options(self) -> dict[str, Any]:
        """The ``deepspeed`` section without the options that other keys decide."""
        return undecided_options(self.deepspeed)


def config_hash(config: Config) -> str:
    """16 hex digits that are equal exactly when every value of two configs is equal."""
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def flat_values(config: Config) -> dict[str, Any]:
    """Every value of a config by its dotted key, as JSON types."""
    return flat_keys(config.model_dump(mode="json"))


def flat_keys(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested mappings by their dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= flat_keys(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _nearest(value: int, candidates: list[int]) -> int:
    return min(candidates, key=lambda candidate: abs(candidate - value))


def _multiples_around(value: int, step: int) -> str:
    below = value // step * step
    return f"{below} or {below + step}" if below else str(step)
