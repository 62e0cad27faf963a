"""How far an evaluation is, and how long the rest may take."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...words import duration, time_left
from .units import UnitResult

Say = Callable[[str], None]


class Progress:
    """Tells after each unit how far the whole is and how long the rest may take."""

    def __init__(self, work: Sequence[float], say: Say) -> None:
        self.units, self.left, self.say = len(work), sum(work), say
        self.done = 0
        self.seconds = self.worked = 0.0

    def skip(self, work: float) -> None:
        """A unit was stored already."""
        self.done += 1
        self.left -= work

    def step(self, work: float, label: str, result: UnitResult) -> None:
        """A unit was computed."""
        self.skip(work)
        self.seconds += result.seconds
        self.worked += work
        rest = time_left(self.seconds, self.worked, self.worked + self.left)
        ahead = f", {rest}" if self.done < self.units else ""
        self.say(
            f"[{self.done}/{self.units}] {label}: {result.score:.2f} in "
            f"{duration(result.seconds)}{ahead}"
        )
