"""Training: DeepSpeed engine, gradient scale, the loop, checkpoints.

Read in this order: ``launch`` (ranks), ``preflight`` (what they agree on), ``job`` (data, model,
engine), ``loop`` (the run), ``step`` (the loss and gradient scale), ``checkpoint`` and ``resume``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .consolidate import gather_state_dict, load_consolidated_state_dict
    from .dry_run import dry_run
    from .job import Job
    from .loop import Trainer, train

_HOME = {
    "Job": ".job",
    "Trainer": ".loop",
    "dry_run": ".dry_run",
    "gather_state_dict": ".consolidate",
    "load_consolidated_state_dict": ".consolidate",
    "train": ".loop",
}

__all__ = [
    "Job",
    "Trainer",
    "dry_run",
    "gather_state_dict",
    "load_consolidated_state_dict",
    "train",
]


def __getattr__(name: str) -> Any:
    # Lazy: parity builds on train.step, and train.loop on parity.
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
