"""The scores as tables: every task by length, means over tasks and snapshots, the paper's rows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ...markdown import markdown_table
from ...words import counted
from ..lengths import length_label
from .catalog import PRESETS, PUBLISHED, RULER, published_score
from .require import UNTRAINED
from .run import Findings
from .sources import PUBLISHED_TEXT
from .units import UnitResult

# A mean over tasks is the preset's only when all of its tasks are in.
MEANS = ("ruler-13", "ruler-11")


@dataclass(frozen=True)
class Cell:
    """One number of a table: a mean over snapshots, percent."""

    mean: float
    spread: float | None
    """Standard deviation over snapshots (n − 1); None for one."""
    snapshots: int

    def __str__(self) -> str:
        spread = "" if self.spread is None else f" ± {self.spread:.2f}"
        return f"{self.mean:.2f}{spread}"


@dataclass(frozen=True)
class Report:
    """What an evaluation found."""

    models: list[str]
    lengths: list[int]
    scores: dict[str, dict[str, Cell]]
    """Task or mean -> length in tokens (or ``""``) -> cell."""
    results: list[UnitResult]
    partial: list[UnitResult]
    """Stored results of units that other models lack; in no mean."""
    skipped: dict[str, str]
    published: dict[str, dict[str, float]]
    """The paper's means of 11 tasks, LLaMA-2-7B: theirs, on another model; only at lengths at
    which the mean of these tasks was measured."""


def summarize(findings: Findings) -> Report:
    """Means over snapshots, and over the tasks of each preset that is complete."""
    results = findings.results
    models = list(dict.fromkeys(result.model for result in results))
    lengths = sorted({r.length for r in results if r.length is not None})
    scores: dict[str, dict[str, Cell]] = {}
    for task in dict.fromkeys(result.task for result in results):
        own = [result for result in results if result.task == task]
        scores[task] = {
            _key(length): _cell([r.score for r in own if r.length == length])
            for length in dict.fromkeys(result.length for result in own)
        }
    for name, tasks in _means(results):
        row = {}
        for length in lengths:
            at = [r for r in results if r.length == length and r.task in tasks]
            each = [[r.score for r in at if r.model == model] for model in models]
            if all(len(values) == len(tasks) for values in each):
                row[_key(length)] = _cell([statistics.fmean(values) for values in each])
        if row:
            scores[name] = row
    comparable = [length for length in lengths if _key(length) in scores.get("ruler-11", {})]
    published = {
        row: {_key(n): score for n in comparable if (score := published_score(row, n)) is not None}
        for row in PUBLISHED
    }
    return Report(
        models=models,
        lengths=lengths,
        scores=scores,
        results=results,
        partial=findings.partial,
        skipped=findings.skipped,
        published={row: values for row, values in published.items() if values},
    )


def score_rows(report: Report) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of RULER's table: a line a task, then means, then the paper's rows."""
    headers = ["RULER", *(length_label(length) for length in report.lengths)]
    keys = [_key(length) for length in report.lengths]
    rows = []
    for name, cells in report.scores.items():
        if any(key in cells for key in keys):
            label = RULER[name].label if name in RULER else f"mean, {name}"
            rows.append([label, *(str(cells.get(key, "–")) for key in keys)])
    for name, values in report.published.items():
        label = f"paper: {name}"
        rows.append([label, *(f"{values[k]:.2f}" if k in values else "–" for k in keys)])
    return headers, rows


def other_rows(report: Report) -> list[list[str]]:
    """Rows of the tasks that have no length of ours: name, metric, score."""
    metrics = {result.task: result.metric for result in report.results}
    return [
        [name, metrics[name], str(cells[""])]
        for name, cells in report.scores.items()
        if "" in cells
    ]


def partial_rows(report: Report) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of what only some snapshots have: a line a unit, a column a snapshot."""
    units: dict[tuple[str, int | None], dict[str, str]] = {}
    for result in report.partial:
        row = units.setdefault((result.task, result.length), {})
        row[result.model] = f"{result.score:.2f}"
    rows = []
    for (task, length), scores in units.items():
        label = RULER[task].label if task in RULER else task
        tokens = "–" if length is None else length_label(length)
        rows.append([label, tokens, *(scores.get(model, "–") for model in report.models)])
    return ["task", "tokens", *report.models], rows


def notes(report: Report) -> list[str]:
    """What a reader must know beside the numbers."""
    found = []
    if report.published:
        found.append(
            "Rows marked *paper* are published scores of another model (arXiv 2411.13476: "
            "LLaMA-2-7B trained on SlimPajama at 128K, mean of 11 tasks); they were not measured "
            "here. The paper prints 4K and does not say whether 4,000 or 4,096."
        )
    if len(report.models) > 1:
        found.append(f"Mean ± standard deviation of {len(report.models)} snapshots.")
    for source in ("haystack", "squad", "hotpotqa"):
        names = {r.texts[source] for r in report.results if source in r.texts}
        local = sorted(names - {PUBLISHED_TEXT})
        if local:
            found.append(f"The {source} was {', '.join(local)}, not {PUBLISHED_TEXT}.")
    if any(r.texts.get("sentences") == UNTRAINED for r in report.results):
        found.append("Sentences of the haystack were told apart by nltk's splitter, untrained.")
    short = [r for r in report.results if r.requested and r.samples < r.requested]
    if short and any(r.length for r in short):
        found.append(f"Fewer samples than asked for in {', '.join({r.task for r in short})}.")
    return [*found, *(f"Not run: {task}: {why}." for task, why in report.skipped.items())]


def markdown(report: Report) -> str:
    """The report as a page section."""
    headers, rows = score_rows(report)
    names = ", ".join(f"`{model}`" for model in report.models)
    parts = []
    if samples := sorted({result.samples for result in report.results}):
        fewest = f"{samples[0]} to " if len(samples) > 1 else ""
        parts.append(f"{names}: percent, of {fewest}{counted(samples[-1], 'sample')}.")
    if rows and report.lengths:
        parts.append(markdown_table(headers, rows))
    if others := other_rows(report):
        parts.append(markdown_table(["task", "metric", "score"], others))
    if report.partial:
        parts.append("Of these not every snapshot has a score; they are in no mean.")
        parts.append(markdown_table(*partial_rows(report)))
    return "\n\n".join([*parts, *notes(report)])


def _means(results: Sequence[UnitResult]) -> list[tuple[str, list[str]]]:
    """Complete presets; else, for several of RULER's tasks, the mean of those that ran."""
    ran = [name for name in RULER if any(result.task == name for result in results)]
    complete = [(name, PRESETS[name]) for name in MEANS if set(PRESETS[name]) <= set(ran)]
    if complete or len(ran) < 2:
        return complete
    return [(f"these {len(ran)} tasks", ran)]


def _key(length: int | None) -> str:
    return "" if length is None else str(length)


def _cell(values: Sequence[float]) -> Cell:
    spread = statistics.stdev(values) if len(values) > 1 else None
    return Cell(statistics.fmean(values), spread, len(values))
