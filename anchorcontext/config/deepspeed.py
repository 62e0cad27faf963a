"""Which DeepSpeed options our own keys decide.

Everything else in the ``deepspeed`` section passes through. An option listed here may be repeated
with the value that our key has, or say "auto" as configs written for other trainers do.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from anchorcontext.config.base import Problem, shown

if TYPE_CHECKING:
    from anchorcontext.config.schema import Config

# Option -> (our key, the value it must have).
_EQUAL: dict[str, tuple[str, Callable[[Config], Any]]] = {
    "zero_optimization.stage": ("train.zero_stage", lambda c: c.train.zero_stage),
    "gradient_clipping": ("train.clip_norm", lambda c: c.train.clip_norm or 0.0),
    "bf16.enabled": ("model.dtype", lambda c: c.model.dtype == "bf16"),
    "bfloat16.enabled": ("model.dtype", lambda c: c.model.dtype == "bf16"),
    "fp16.enabled": ("model.dtype", lambda c: False),
    "amp.enabled": ("model.dtype", lambda c: False),
    "torch_autocast.enabled": ("model.dtype", lambda c: False),
}

# Option -> the keys that decide it. Batch sizes are here whatever their value: DeepSpeed multiplies
# by all ranks where we count windows of SP groups, so equal numbers would not mean the same.
_OURS: dict[str, str] = {
    "train_batch_size": "train.windows_per_step",
    "train_micro_batch_size_per_gpu": "train.micro_batch_windows",
    "gradient_accumulation_steps": "train.windows_per_step",
    "optimizer": "the optimizer section",
    "scheduler": "the schedule section",
    "sequence_parallel_size": "parallel.sp",
    "tensor_parallel": "the parallel section",
    "pipeline": "the parallel section",
    "elasticity": "train.windows_per_step",
    "autotuning": "train.windows_per_step and train.micro_batch_windows",
    "curriculum_learning": "data.window_tokens",
    "data_efficiency": "the data section",
    "sparse_attention": "attention.mode",
}


def contradictions(config: Config) -> list[Problem]:
    """The options of the ``deepspeed`` section that another key of ``config`` decides otherwise."""
    problems = []
    for option, (key, decide) in _EQUAL.items():
        given, ours = _get(config.deepspeed, option), decide(config)
        if given not in (None, "auto") and given != ours:
            value = _get(config.model_dump(), key)
            rule = f"contradicts {key} = {shown(value)}"
            fix = f"change {key} and leave this option out"
            problems.append(Problem(f"deepspeed.{option}", given, rule, fix))
    for option, key in _OURS.items():
        given = _get(config.deepspeed, option)
        if given not in (None, "auto"):
            rule = f"is decided by {key}"
            problems.append(Problem(f"deepspeed.{option}", given, rule, f"set {key} instead"))
    if config.train.partitioned_init and config.train.zero_stage != 3:
        rule = (
            f"ZeRO-3 alone partitions parameters, and train.zero_stage = {config.train.zero_stage}"
        )
        fix = "set it to false, or zero_stage to 3"
        problems.append(Problem("train.partitioned_init", True, rule, fix))
    device, ours = optimizer_device(config), config.train.offload_optimizer
    if ours not in ("none", device):
        option = "deepspeed.zero_optimization.offload_optimizer.device"
        rule = f"contradicts train.offload_optimizer = {ours}"
        problems.append(Problem(option, device, rule, "leave one of the two out"))
    if device != "none" and config.train.zero_stage == 0:
        rule = "master weights are offloaded where ZeRO shards them, and train.zero_stage = 0"
        problems.append(
            Problem("train.offload_optimizer", device, rule, "set it to none, or zero_stage to 1")
        )
    zero = config.deepspeed.get("zero_optimization", {})
    if not isinstance(zero, dict):
        rule = "is a section of options"
        fix = "set the stage with train.zero_stage"
        problems.append(Problem("deepspeed.zero_optimization", zero, rule, fix))
    return problems


def optimizer_device(config: Config) -> str:
    """Where master weights and optimiser state are: ``none`` (the device), ``cpu`` or ``nvme``."""
    given = _get(config.deepspeed, "zero_optimization.offload_optimizer.device")
    return config.train.offload_optimizer if given is None else str(given)


def undecided_options(options: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``options`` without those that our keys decide."""
    kept = deepcopy(options)
    for option in (*_EQUAL, *_OURS):
        *parents, last = option.split(".")
        section: Any = kept
        for name in parents:
            section = section.get(name, {}) if isinstance(section, dict) else {}
        if isinstance(section, dict):
            section.pop(last, None)
    return kept


def _get(options: Any, dotted: str) -> Any:
    for name in dotted.split("."):
        if not isinstance(options, dict):
            return None
        options = options.get(name)
    return options
