"""Arms of an ablation side by side: what differs in their configs, what they cost, how they score.

An arm is a run's folder. Its scores are those of result files of ``anchorcontext evaluate``:
``RUN/evaluation/results.json``, and files given by hand, whose models are told apart by their names
(``RUN-step-000100``).
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config.schema import flat_keys
from ..config.yaml_io import inline_yaml
from ..errors import UserError
from ..markdown import markdown_table
from ..watch.history import RunHistory, position_points, read_run
from ..words import counted
from .comparable import loss_warnings
from .scores import read_results

RESULTS = Path("evaluation") / "results.json"
NAMES_ALONE = ("run.name", "run.output_dir")
"""Keys in which every two runs differ."""
MIB = 2**20


@dataclass(frozen=True)
class Arm:
    """One run and what is known of it."""

    name: str
    run: RunHistory
    config: dict[str, Any]
    """Dotted key -> value."""
    scores: dict[str, float] = field(default_factory=dict)
    """``task`` or ``task/4096`` -> mean over the run's models in the result files."""

    @property
    def figures(self) -> dict[str, float]:
        """The scores, and what the run's last evaluation measured."""
        return {**self.run.summary.evaluation, **self.scores}

    def score_curve(self, task: str) -> list[tuple[int, float]]:
        """(length, score) of one task."""
        return _curve(self.figures, rf"{re.escape(task)}/(\d+)")

    def position_curve(self) -> list[tuple[int, float]]:
        """(end of the range, loss), from result files, else from the run's last evaluation."""
        return position_points(self.scores, "loss-by-position") or position_points(self.figures)


@dataclass(frozen=True)
class Comparison:
    """Everything that is shown of the arms."""

    arms: list[Arm]
    differences: dict[str, list[Any]]
    """Config key -> its value in every arm, for the keys that differ."""
    rows: list[tuple[str, list[float | None], str]]
    """What, its value in every arm, its format."""
    warnings: list[str]
    """Why losses cannot be compared."""

    def cells(self) -> list[list[str]]:
        """The rows as text."""
        return [
            [name, *("-" if v is None else format(v, form) for v in values)]
            for name, values, form in self.rows
        ]

    def difference_cells(self) -> list[list[str]]:
        """The config keys that differ, with their values as YAML has them."""
        return [
            [
                key,
                *(inline_yaml(arm.config[key]) if key in arm.config else "-" for arm in self.arms),
            ]
            for key in self.differences
        ]


def compare_runs(folders: Sequence[Path], results: Sequence[Path] = ()) -> Comparison:
    """Read the arms.

    Args:
        folders: of two or more runs.
        results: further result files.

    Raises:
        UserError: fewer than two runs, no metrics, two runs of one name, results of no run here.
    """
    if len(folders) < 2:
        raise UserError("a comparison needs two runs or more: give the folders of several")
    runs = {folder: read_run(folder) for folder in folders}
    names = [run.name for run in runs.values()]
    if len(set(names)) < len(names):
        raise UserError(
            f"two runs are called the same among {', '.join(names)}: results are told apart by the "
            "runs' names; rename a folder"
        )
    scores = _scores(runs, results)
    arms = [
        Arm(run.name, run, flat_keys(run.config or {}), scores[run.name]) for run in runs.values()
    ]
    warnings = loss_warnings([arm.config for arm in arms])
    return Comparison(arms, _differences(arms), _rows(arms), warnings)


def comparison_markdown(found: Comparison) -> str:
    """The differences and the figures as two tables, and what forbids to compare them."""
    names = [arm.name for arm in found.arms]
    different = found.difference_cells()
    parts = ["The configs are equal."]
    if different:
        parts = [f"The configs differ in {counted(len(different), 'key')}:"]
        parts.append(markdown_table(["key", *names], different))
    notes = [f"Note: {warning}." for warning in found.warnings]
    return "\n\n".join([*parts, markdown_table(["", *names], found.cells()), *notes]) + "\n"


def _scores(
    runs: Mapping[Path, RunHistory], results: Sequence[Path]
) -> dict[str, dict[str, float]]:
    """Run's name -> score by name, the mean over the run's models."""
    own = {folder / RESULTS: run.name for folder, run in runs.items()}
    files = {path: name for path, name in own.items() if path.is_file()}
    collected: dict[str, dict[str, list[float]]] = {
        run.name: defaultdict(list) for run in runs.values()
    }
    for path in dict.fromkeys([*files, *results]):
        for model, values in read_results(path).items():
            name = files.get(path) or _run_of(model, list(collected), path)
            for score, value in values.items():
                collected[name][score].append(value)
    return {
        name: {score: statistics.fmean(values) for score, values in found.items()}
        for name, found in collected.items()
    }


def _run_of(model: str, names: Sequence[str], path: Path) -> str:
    """The run that a model is a checkpoint or an export of: the longest name that fits."""
    fitting = [name for name in names if model == name or model.startswith(f"{name}-")]
    if not fitting:
        raise UserError(
            f"{path} holds results of {model}, which is none of the runs {', '.join(names)}: leave "
            "the file out, or add the run"
        )
    return max(fitting, key=len)


def _differences(arms: Sequence[Arm]) -> dict[str, list[Any]]:
    keys = sorted({key for arm in arms for key in arm.config} - set(NAMES_ALONE))
    found = {key: [arm.config.get(key) for arm in arms] for key in keys}
    return {key: values for key, values in found.items() if any(v != values[0] for v in values)}


def _rows(arms: Sequence[Arm]) -> list[tuple[str, list[float | None], str]]:
    summaries = [arm.run.summary for arm in arms]
    rows: list[tuple[str, list[float | None], str]] = [
        ("steps", [s.steps for s in summaries], ",.0f"),
        ("tokens", [s.tokens for s in summaries], ",.0f"),
        ("training loss, last step", [s.last_loss for s in summaries], ".4f"),
        ("tokens/s, median step", [s.median_tokens_per_second for s in summaries], ",.0f"),
        ("peak memory of a rank, MiB", [s.peak_memory_bytes / MIB for s in summaries], ",.0f"),
        (
            "sent in attention, MiB a step",
            [s.bytes_sent / MIB / s.steps if s.steps else None for s in summaries],
            ",.1f",
        ),
        ("busiest rank's attention / mean", [s.attention_balance for s in summaries], ".2f"),
    ]
    for name in dict.fromkeys(name for s in summaries for name in s.evaluation):
        rows.append(
            (f"last evaluation: {name}", [s.evaluation.get(name) for s in summaries], ".4f")
        )
    for name in dict.fromkeys(name for arm in arms for name in arm.scores):
        form = ".4f" if name.startswith("loss-by-position/") else ".2f"
        rows.append((name, [arm.scores.get(name) for arm in arms], form))
    return rows


def _curve(values: Mapping[str, float], pattern: str) -> list[tuple[int, float]]:
    """(the number in the name, value) of the names that match, ascending."""
    found = ((re.fullmatch(pattern, name), value) for name, value in values.items())
    return sorted((int(match[1]), value) for match, value in found if match)
