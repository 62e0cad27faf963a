"""Learning rate schedules: constant and cosine, each with a linear warm-up."""

from __future__ import annotations

import math
from collections.abc import Callable


def learning_rate_factor(
    kind: str, *, warmup_steps: int, total_steps: int, min_ratio: float
) -> Callable[[int], float]:
    """The factor on the base learning rate as a function of the step (0 is the first).

    ``warmup_steps`` steps rise linearly, 1/w, 2/w, ..., 1. Then ``constant`` stays at 1 and
    ``cosine`` falls to ``min_ratio``, which the last step (``total_steps - 1``) uses.
    """
    assert kind in ("constant", "cosine"), kind

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        if kind == "constant":
            return 1.0
        span = max(1, total_steps - 1 - warmup_steps)
        progress = min(1.0, (step - warmup_steps) / span)
        return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return factor
