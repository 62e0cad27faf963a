"""A whole run in one table, from what it left on disk: restarts and resumes included."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ..errors import UserError
from ..words import counted
from .jsonl import read_metrics

METRICS_FILE = "metrics.jsonl"
MIB = 2**20
NOTHING_YET = "-"


@dataclass(frozen=True)
class RunSummary:
    """What a run did so far; None where it has not come to that."""

    run_dir: Path
    steps: int
    skipped: int
    starts: int
    """How often training began or went on."""
    first_loss: float | None
    last_loss: float | None
    tokens: int
    median_tokens_per_second: float | None
    """Of the whole job, median over steps: the first step's warm-up does not count against it."""
    peak_memory_bytes: int
    """Of the rank that used most."""
    bytes_sent: int
    """In attention, all ranks, all steps."""
    bytes_predicted: int | None
    """What the plans said it would be; None where a step does not hold it."""
    seconds_saving: float
    """Training time lost to checkpoints."""
    seconds_evaluation: float
    """Training time spent on evaluation."""
    evaluated_step: int | None
    """Of the last evaluation."""
    evaluation: dict[str, float]
    """What it measured, by name."""
    attention_balance: float | None
    """Mean over steps of the busiest rank's attention pairs over the mean rank's."""
    parity_checks: int
    parity_failures: int
    largest_logit_difference: float | None
    checkpoints: tuple[Path, ...]


def summarize(run_dir: str | Path) -> RunSummary:
    """Read a run folder.

    Raises:
        UserError: the folder holds no metrics.
    """
    run_dir = Path(run_dir)
    path = run_dir / METRICS_FILE
    if not path.is_file():
        raise UserError(
            f"{run_dir} holds no {METRICS_FILE}: give the folder of a run, output_dir/name of its "
            "config, after it has trained"
        )
    records, events = read_metrics(path)
    applied = [record for record in records if record.get("loss") is not None]
    checks = [event for event in events if event["event"] == "parity"]
    evaluations = [event for event in events if event["event"] == "evaluation"]
    return RunSummary(
        run_dir=run_dir,
        steps=records[-1]["step"] if records else 0,
        skipped=sum(bool(record.get("skipped")) for record in records),
        starts=sum(event["event"] == "start" for event in events),
        first_loss=applied[0]["loss"] if applied else None,
        last_loss=applied[-1]["loss"] if applied else None,
        tokens=sum(record["tokens"] for record in records),
        median_tokens_per_second=_median(records, "tokens_per_second"),
        peak_memory_bytes=max((record["peak_memory_bytes"] for record in records), default=0),
        bytes_sent=sum(record["bytes_sent"] for record in records),
        bytes_predicted=_total(records, "bytes_predicted"),
        seconds_saving=sum(_values(records, "seconds_checkpoint")),
        seconds_evaluation=sum(event["seconds"] for event in evaluations),
        evaluated_step=evaluations[-1]["step"] if evaluations else None,
        evaluation=_finite(evaluations[-1]["values"]) if evaluations else {},
        attention_balance=_mean(records, "attention_balance"),
        parity_checks=len(checks),
        parity_failures=sum(not check["passed"] for check in checks),
        largest_logit_difference=max(
            (c["largest_logit_difference"] for c in checks if c["largest_logit_difference"]),
            default=0.0 if checks else None,
        ),
        # Those with an ending are being written or removed.
        checkpoints=tuple(sorted((run_dir / "checkpoints").glob("step-*[0-9]"))),
    )


def _finite(values: dict[str, float | None]) -> dict[str, float]:
    """The metrics file has None for a number that is not finite."""
    return {name: value for name, value in values.items() if value is not None}


def _values(records: list[dict[str, Any]], name: str) -> list[float]:
    return [record[name] for record in records if record.get(name) is not None]


def summary_rows(found: RunSummary) -> list[tuple[str, str]]:
    """The run in words: what, and how much."""
    starts = counted(found.starts, "time")
    return [
        ("steps", f"{found.steps:,}, {found.skipped} skipped, started {starts}"),
        ("loss, first -> last", f"{_loss(found.first_loss)} -> {_loss(found.last_loss)}"),
        ("tokens", f"{found.tokens:,}"),
        ("tokens/s, median step", _number(found.median_tokens_per_second, ",.0f")),
        ("peak memory of a rank", f"{found.peak_memory_bytes / MIB:,.0f} MiB"),
        ("sent in attention", f"{found.bytes_sent / MIB:,.1f} MiB, all ranks, all steps"),
        ("as predicted", _predicted(found)),
        ("busiest rank / mean", _number(found.attention_balance, ".2f") + " of attention"),
        (
            "largest logit difference",
            f"{_number(found.largest_logit_difference, '.2e')} in "
            f"{counted(found.parity_checks, 'parity check')}, {found.parity_failures} failed",
        ),
        ("lost to saving", f"{found.seconds_saving:,.1f} s"),
        *_evaluation_rows(found),
    ]


def _evaluation_rows(found: RunSummary) -> list[tuple[str, str]]:
    if found.evaluated_step is None:
        return []
    values = ", ".join(f"{name} {value:.4g}" for name, value in found.evaluation.items())
    return [
        (f"evaluated, step {found.evaluated_step:,}", values),
        ("spent on evaluation", f"{found.seconds_evaluation:,.1f} s"),
    ]


def _predicted(found: RunSummary) -> str:
    if found.bytes_predicted is None:
        return NOTHING_YET
    text = f"{found.bytes_predicted / MIB:,.1f} MiB"
    off = found.bytes_sent - found.bytes_predicted
    return f"{text}, {'equal to the byte' if off == 0 else f'{off:+,} bytes sent'}"


def _loss(value: float | None) -> str:
    return _number(value, ".4f")


def _number(value: float | None, form: str) -> str:
    return NOTHING_YET if value is None else format(value, form)


def _total(records: list[dict[str, Any]], name: str) -> int | None:
    values = _values(records, name)
    return int(sum(values)) if records and len(values) == len(records) else None


def _median(records: list[dict[str, Any]], name: str) -> float | None:
    values = _values(records, name)
    return median(values) if values else None


def _mean(records: list[dict[str, Any]], name: str) -> float | None:
    values = _values(records, name)
    return sum(values) / len(values) if values else None
