"""Backends: whose code moves and attends to the keys, and the plan each of them follows."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from ..errors import UserError
from ..window import Window
from .batch import BatchPlan
from .ring_flash_attn import RingFlashAttnPlan

BACKENDS: dict[str, type[BatchPlan]] = {
    "native": BatchPlan,
    "ring_flash_attn": RingFlashAttnPlan,
}


def plan_batch(
    windows: Sequence[Window], sp_size: int, *, backend: str = "native", **options: Any
) -> BatchPlan:
    """The plan of a micro-batch for a backend; ``options`` are those of its class.

    Raises:
        UserError: there is no such backend, or it cannot express what is asked.
    """
    if backend not in BACKENDS:
        near = difflib.get_close_matches(backend, BACKENDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"backend {backend!r}: must be one of {', '.join(BACKENDS)}{hint}")
    return BACKENDS[backend](windows, sp_size, **options)
