"""``evaluate``: what is measured on the live weights while training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from anchorcontext.config.base import Section
from anchorcontext.config.sections.types import PositiveInt


class EvaluateSection(Section):
    """A cheap set of measurements between the steps; docs/evaluation.md defines them."""

    every: PositiveInt | None = None
    """Steps between evaluations; there is also one after the last step. Null never evaluates."""

    at_start: bool = True
    """Also before the first step."""

    tasks: Annotated[
        tuple[Literal["held_out", "loss_by_position", "niah_single"], ...],
        Field(strict=False, min_length=1),
    ] = ("held_out",)
    """``held_out``: loss of the validation windows; ``loss_by_position``: of long held-out
    documents, by position; ``niah_single``: a number hidden in a haystack."""

    lengths: Annotated[
        tuple[Annotated[int, Field(ge=2)], ...] | None, Field(strict=False, min_length=1)
    ] = None
    """Context lengths in tokens; ``loss_by_position`` reads documents up to the longest. Null is
    ``data.window_tokens``."""

    windows: PositiveInt = 16
    """The first windows of the validation split, which ``held_out`` scores."""

    documents: PositiveInt = 4
    """The first held-out documents of the longest length, which ``loss_by_position`` reads."""

    needles: PositiveInt = 10
    """Prompts of ``niah_single`` at each length."""
