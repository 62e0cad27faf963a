"""Before any device is held: memory, work, traffic and time of a configured run, in closed form.

Read in this order: ``shape`` (the model's sizes), ``windows`` (what is planned), ``links`` (bytes
between ranks), ``memory``, ``time``, ``report``. ``docs/planning.md`` derives every term.
"""

from ..hardware import Hardware, load_hardware, profile_names
from ..watch.sizes import ModelSizes, model_sizes
from .memory import MemoryEstimate, StateMemory, activation_memory, estimate_memory, state_memory
from .report import (
    KINDS,
    ModeEstimate,
    PlanEstimate,
    WorldEstimate,
    estimate_plan,
    fit_world,
    micro_batch_memory,
)
from .shape import configured_sizes
from .windows import MIXES, default_mix, sample_windows

__all__ = [
    "KINDS",
    "MIXES",
    "Hardware",
    "MemoryEstimate",
    "ModeEstimate",
    "ModelSizes",
    "PlanEstimate",
    "StateMemory",
    "WorldEstimate",
    "activation_memory",
    "configured_sizes",
    "default_mix",
    "estimate_memory",
    "estimate_plan",
    "fit_world",
    "load_hardware",
    "micro_batch_memory",
    "model_sizes",
    "profile_names",
    "sample_windows",
    "state_memory",
]
