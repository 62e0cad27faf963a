"""Whether a run may go on under a changed config."""

from __future__ import annotations

import logging

from ..config import Config, flat_values
from ..errors import UserError

logger = logging.getLogger(__name__)

# Keys that change how a run is watched, kept or ended, not what a step computes. What the data
# section decides is compared through the fingerprint of the prepared windows.
_FREE = (
    "run.name",
    "run.output_dir",
    "train.log_every",
    "train.partitioned_init",
    "train.steps",
)
_FREE_SECTIONS = ("checkpoint.", "evaluate.", "guards.", "parity.", "watch.", "data.")
_COUNTS = ("data.shuffle",)
# How the same numbers are computed: only their rounding changes, which the log says.
_ROUNDING = (
    "attention.anchor.copies",
    "attention.backend",
    "attention.engine",
    "attention.exact",
    "attention.exchange",
    "attention.layout",
    "attention.ulysses",
    "loss.chunk_tokens",
    "loss.kernel",
    "model.checkpoint_every",
    "model.compile",
    "model.gradient_checkpointing",
    "model.keep_attention",
    "model.mlp_chunk_tokens",
    "model.offload_activations",
    "parallel.exchange_memory",
    "parallel.hardware",
    "parallel.sp",
    "train.deterministic",
    "train.micro_batch_windows",
    "train.offload_optimizer",
    "train.zero_stage",
)


def check_resumable(saved: Config, current: Config) -> None:
    """Refuse a resume whose config would make it another run.

    Raises:
        UserError: names every key that differs, with both values.
    """
    before, after = (
        {key: value for key, value in flat_values(config).items() if value != {}}
        for config in (saved, current)
    )
    changed = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
    rounding = [key for key in changed if key in _ROUNDING]
    if rounding:
        logger.info("changed since the checkpoint, equal up to rounding: %s", ", ".join(rounding))
    fatal = [key for key in changed if key not in _ROUNDING and not _is_free(key, current)]
    if fatal:
        lines = [f"{key}: {before.get(key)!r} -> {after.get(key)!r}" for key in fatal]
        raise UserError(
            f"the run {current.run.name!r} cannot go on under another config: "
            + "; ".join(lines)
            + "; restore the saved values, or give the new run another run.name"
        )


def _is_free(key: str, config: Config) -> bool:
    if key == "train.steps" and config.schedule.type != "constant":
        return False  # the schedule is a function of the last step
    if key in _COUNTS:
        return False
    return key in _FREE or key.startswith(_FREE_SECTIONS)
