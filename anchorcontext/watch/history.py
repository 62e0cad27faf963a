"""A run as its folder tells it: running, killed, stopped or done."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.yaml_io import read_mapping
from ..errors import UserError
from .jsonl import read_metrics
from .redact import redact
from .summary import METRICS_FILE, RunSummary, summarize

PROBLEMS = (
    "not_finite",
    "loss_spike",
    "gradient_spike",
    "checkpoint_failed",
    "parity_left_out",
    "failed",
)
"""Events that somebody should look at."""
PARTS = ("data", "exchange", "compute", "optimizer", "other")
"""What the seconds of a step are made of."""


@dataclass(frozen=True)
class RunHistory:
    """Everything a report shows."""

    summary: RunSummary
    records: list[dict[str, Any]]
    """By step, ascending; each step once, as it was last trained."""
    events: list[dict[str, Any]]
    """In order of time, over all starts."""
    config: dict[str, Any] | None
    """Resolved, without secrets; None where ``config.yaml`` cannot be read."""
    written: float
    """When the metrics were last written, seconds since 1970."""

    @property
    def name(self) -> str:
        """The run's name: that of its folder."""
        return self.summary.run_dir.resolve().name

    @property
    def total_steps(self) -> int | None:
        """``train.steps`` of the config."""
        section = (self.config or {}).get("train")
        steps = section.get("steps") if isinstance(section, dict) else None
        return steps if isinstance(steps, int) else None

    @property
    def starts(self) -> list[dict[str, Any]]:
        """The ``start`` events, each with ``ended``: how what it started came to its end.

        ``seconds_down``, where known: how long no process had written anything before it.
        """
        found: list[dict[str, Any]] = []
        for event in self.events:
            if event["event"] == "start":
                found.append({**event, "ended": "killed"})
            elif found and event["event"] in ("end", "stop", "failed"):
                found[-1]["ended"] = _ended(event)
        if found and found[-1]["ended"] == "killed":
            found[-1]["ended"] = "-"
        return found

    @property
    def evaluations(self) -> dict[int, dict[str, float]]:
        """Step -> what was measured after it, by name; of a repeated step the last counts."""
        found = {e["step"]: e["values"] for e in self.events if e["event"] == "evaluation"}
        return {step: found[step] for step in sorted(found)}

    @property
    def seconds_down(self) -> float | None:
        """Between the ends of processes and the starts after them, but not after the run was done;
        None where no start says so."""
        starts = self.starts
        pauses = [
            start["seconds_down"]
            for before, start in itertools.pairwise(starts)
            if before["ended"] != "done" and start.get("seconds_down") is not None
        ]
        return sum(pauses) if pauses else None

    @property
    def state(self) -> str:
        """What the last start came to, in words."""
        ended = self.starts[-1]["ended"] if self.starts else "-"
        return "running, or killed" if ended == "-" else ended

    @property
    def made_by(self) -> dict[str, Any]:
        """``commit``, ``versions``, ``ranks``, ``device`` of the last start, as far as known."""
        return self.starts[-1] if self.starts else {}


def read_run(run_dir: str | Path) -> RunHistory:
    """Read a run folder, also while the run goes on.

    Raises:
        UserError: the folder holds no metrics.
    """
    run_dir = Path(run_dir)
    summary = summarize(run_dir)
    path = run_dir / METRICS_FILE
    records, events = read_metrics(path)
    return RunHistory(
        summary, records, events, _config(run_dir / "config.yaml"), os.stat(path).st_mtime
    )


def seconds_of(record: dict[str, Any]) -> dict[str, float]:
    """The parts of a step's seconds; ``other`` is what the known ones leave."""
    seconds = record.get("seconds") or 0.0
    known = {part: record.get(f"seconds_{part}") or 0.0 for part in PARTS if part != "other"}
    return {**known, "other": max(seconds - sum(known.values()), 0.0)}


def position_points(
    values: Mapping[str, float | None], task: str = "loss_by_position"
) -> list[tuple[int, float]]:
    """(end of the range, loss) of ``TASK/START-STOP`` among measured values, ascending."""
    found = ((re.fullmatch(rf"{task}/\d+-(\d+)", name), value) for name, value in values.items())
    return sorted((int(match[1]), value) for match, value in found if match and value is not None)


def local_time(seconds: float | None) -> str:
    """A time of day of this machine, to the second."""
    if seconds is None:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _ended(event: dict[str, Any]) -> str:
    kind = event["event"]
    if kind == "end":
        return "done"
    return f"stopped by {event.get('reason', 'a signal')}" if kind == "stop" else "failed"


def _config(path: Path) -> dict[str, Any] | None:
    try:
        values: dict[str, Any] = redact(read_mapping(path)[0])
    except UserError:
        return None
    return values
