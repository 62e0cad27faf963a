"""When a checkpoint is due, and which of those on disk have served."""

from __future__ import annotations

from collections.abc import Iterable

from ..config.sections import CheckpointSection


def is_due(step: int, total: int, section: CheckpointSection, healthy: bool = True) -> bool:
    """Whether a checkpoint is written after ``step`` of ``total`` steps.

    ``healthy``: false after a step that was not finite. What ``every`` asks for is left out then,
    so that a run that breaks does not displace the checkpoints from before.
    """
    regular = any(
        every and step % every == 0
        for every in (section.every if healthy else None, section.keep_every)
    )
    return (
        regular or step in snapshot_steps(total, section) or (step == total and bool(section.final))
    )


def snapshot_steps(total: int, section: CheckpointSection) -> set[int]:
    """Steps of the checkpoints whose scores are averaged: the last ones, at equal distances.

    The paper takes 5, 10 steps apart, over the last 50 steps (arXiv 2411.13476).
    """
    chosen = section.snapshots
    if chosen is None:
        return set()
    return {step for i in range(chosen.last) if (step := total - i * chosen.apart) > 0}


def disposable(steps: Iterable[int], total: int, section: CheckpointSection) -> list[int]:
    """Those of ``steps`` that no rule keeps: the newest, every k-th, the snapshots."""
    ordered = sorted(steps)
    kept = set(ordered[-section.keep :]) | snapshot_steps(total, section)
    if section.keep_every:
        kept |= {step for step in ordered if step % section.keep_every == 0}
    return [step for step in ordered if step not in kept]
