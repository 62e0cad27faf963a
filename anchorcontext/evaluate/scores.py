"""Scores in the result files of ``anchorcontext evaluate``, and their means over snapshots.

The paper's score is the mean of five checkpoints' scores.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError


@dataclass(frozen=True)
class MeanScore:
    """One score over several results."""

    name: str
    mean: float
    deviation: float | None
    """Standard deviation (n − 1); None for one result."""
    count: int


def average_scores(files: Sequence[Path]) -> list[MeanScore]:
    """Mean and standard deviation of every score over result files of ``anchorcontext evaluate``.

    A file of several models counts as several results.

    Raises:
        UserError: a file holds no such results, or not the same scores as the first.
    """
    results = [
        (f"{file} ({model})", scores)
        for file in files
        for model, scores in read_results(file).items()
    ]
    (where, first), *rest = results
    for place, scores in rest:
        different = sorted(first.keys() ^ scores.keys())
        if different:
            raise UserError(
                f"{place} and {where} have different scores: {', '.join(different[:5])} is in one "
                "of them only; average results of the same tasks and lengths"
            )
    found = []
    for name in first:
        values = [scores[name] for _, scores in results]
        deviation = statistics.stdev(values) if len(values) > 1 else None
        found.append(MeanScore(name, statistics.fmean(values), deviation, len(values)))
    return found


def read_results(file: Path) -> dict[str, dict[str, float]]:
    """Model -> score by name, of a result file: ``task/4096``, ``task`` where it has no length of
    ours, and ``loss-by-position/0-1024``.

    Raises:
        UserError: the file cannot be read or holds no scores.
    """
    try:
        values = json.loads(file.read_text())
        found = {**_harness_scores(values), **_position_losses(values)}
    except FileNotFoundError:
        raise UserError(
            f"{file}: no such file; give files that `anchorcontext evaluate` wrote, results.json "
            "or --json"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file}: cannot be read as results ({type(error).__name__}: {error}); give files that "
            "`anchorcontext evaluate` wrote, results.json or --json"
        ) from None
    if not found:
        raise UserError(f"{file}: holds no scores; give results.json of `anchorcontext evaluate`")
    models: dict[str, dict[str, float]] = {}
    for (model, name), value in found.items():
        models.setdefault(model, {})[name] = value
    return models


def _harness_scores(values: dict[str, Any]) -> dict[tuple[str, str], float]:
    results = values.get("harness", {}).get("results", [])
    return {
        (
            row["model"],
            row["task"] if row["length"] is None else f"{row['task']}/{row['length']}",
        ): float(row["score"])
        for row in results
    }


def _position_losses(values: dict[str, Any]) -> dict[tuple[str, str], float]:
    return {
        (report["model"], f"loss-by-position/{bucket['start']}-{bucket['stop']}"): bucket["loss"]
        for report in values.get("loss-by-position", [])
        for bucket in report["buckets"]
        if bucket["loss"] is not None
    }
