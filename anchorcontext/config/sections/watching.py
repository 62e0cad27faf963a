"""``parity`` and ``watch``: what is checked and recorded."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from anchorcontext.config.base import Section
from anchorcontext.config.sections.types import PositiveFloat, PositiveInt, Text, bool_or_section


class ParitySection(Section):
    """The distributed run against a single device."""

    at_start: bool = True
    """Check the logits before the first step."""

    at_end: bool = True
    """Check the logits after the last step."""

    every: PositiveInt | None = None
    """Steps between checks on the live weights; null checks at start and end only."""

    stock_tokens: PositiveInt = 2048
    """Tokens of the windows that are compared with stock transformers and its dense mask."""

    logits: PositiveFloat | None = None
    """Largest logit difference allowed, times the largest logit where that exceeds 1; null takes
    the default of the dtype."""

    loss: PositiveFloat | None = None
    """Largest relative loss difference allowed; null takes the default of the dtype."""

    gradient: PositiveFloat | None = None
    """Largest relative gradient difference allowed; null takes the default of the dtype."""


class WandbSection(Section):
    """A Weights & Biases run; without a network or a key it is written offline."""

    project: Text = "anchorcontext"
    """Project name."""

    entity: Text | None = None
    """Team or user; null is the account's default."""

    mode: Literal["auto", "online", "offline"] = "auto"
    """``auto``: online when a key is set, else offline."""


class ProfileSection(Section):
    """Steps whose every operator and kernel is recorded: a Chrome trace in the run's folder."""

    first: PositiveInt = Field(alias="from")
    """The first step recorded; steps count from 1, and the first ones are warm-up."""

    steps: PositiveInt = 3
    """Steps recorded; a trace grows by tens of megabytes a step."""

    ranks: Literal["first", "all"] = "first"
    """``first``: rank 0 alone; ``all``: one trace a rank."""


class WatchSection(Section):
    """What is shown and recorded while training."""

    progress: bool = True
    """Show a progress bar on rank 0."""

    wandb: Annotated[WandbSection | None, BeforeValidator(bool_or_section)] = None
    """``true``, ``false``, or a section; after loading a section or null."""

    tensorboard: bool = False
    """Write TensorBoard events into the run's folder."""

    profile: ProfileSection | None = None
    """``{from: 10, steps: 3}`` profiles steps 10 to 12; null never starts the profiler."""

    peak_flops: PositiveFloat | None = None
    """Peak FLOP/s of one device in the model's dtype; MFU needs it."""
