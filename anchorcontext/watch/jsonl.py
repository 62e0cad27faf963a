"""The metrics file: one JSON object a line, steps and events, safe over kills and resumes."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .redact import redact

if TYPE_CHECKING:
    from .metrics import StepRecord

logger = logging.getLogger(__name__)


class JsonlSink:
    """Appends records and events to one file with one strictly increasing step axis.

    A run that resumes from a checkpoint repeats the steps after it, so on opening the records with
    ``step > resume_step`` are dropped, and with them what a kill left of an unfinished last line.
    Events are history (restarts, saves, parity checks) and stay; they carry ``"event"``, records do
    not. Both carry ``"time"``, seconds since 1970 (UTC). The first event after opening says how
    many records were dropped, ``"superseded"``: steps whose work was lost; and how long nothing had
    been written, ``"seconds_down"``: from the last line of the process before, dropped or not.

    Args:
        path: the file; it and its folder are created when missing.
        resume_step: optimiser steps done in the checkpoint the run starts from; 0 for a new run.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | Path, resume_step: int = 0) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._last_step, self._superseded, self._written = _drop_records_after(
            self.path, resume_step
        )
        self._file = self.path.open("a", encoding="utf-8")
        self._torn = False

    def log(self, record: StepRecord) -> None:
        """Append one record.

        Raises:
            ValueError: its step is not after the last one's.
            OSError: it could not be written; a later call goes on with a fresh line.
        """
        if record.step <= self._last_step:
            raise ValueError(
                f"step {record.step} was logged after step {self._last_step}; steps must increase: "
                "open the file with the step of the checkpoint the run resumed from"
            )
        self._write({**record.as_dict(), "time": _now()})
        self._last_step = record.step

    def event(self, name: str, **values: Any) -> None:
        """Append one event."""
        values, now = json_values(redact(values)), _now()
        if self._superseded:
            values["superseded"], self._superseded = self._superseded, 0
        if self._written is not None:
            values["seconds_down"] = round(max(now - self._written, 0.0), 3)
            self._written = None
        self._write({"event": name, "time": now, **values})

    def evaluation(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        """Append an event ``evaluation``; a repeated step has several, of which the last counts."""
        self.event("evaluation", step=step, seconds=round(seconds, 3), values=dict(values))

    def close(self) -> None:
        """Close the file; further calls raise."""
        self._file.close()

    def _write(self, values: dict[str, Any]) -> None:
        line = json.dumps(values, allow_nan=False) + "\n"
        # A write that failed half-way (disk full) must not spoil the next line too.
        text = "\n" + line if self._torn else line
        self._torn = True
        self._file.write(text)
        self._file.flush()
        self._torn = False


def read_metrics(path: str | Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The records (by step, ascending) and the events (in order) of a metrics file.

    Unfinished lines are left out; of a step that was written twice the later one counts.
    """
    records: dict[int, dict[str, Any]] = {}
    events = []
    for _, values in _parsed(Path(path)):
        if values is None:
            continue
        if "event" in values:
            events.append(values)
        elif isinstance(values.get("step"), int):
            records[values["step"]] = values
    return [records[step] for step in sorted(records)], events


def _now() -> float:
    return round(time.time(), 3)


def _drop_records_after(path: Path, resume_step: int) -> tuple[int, int, float | None]:
    """Rewrite the file without later records and broken lines; the last step that is left, the
    number of records dropped, and when the last line was written."""
    if not path.exists():
        return 0, 0, None
    last_step = dropped = broken = 0
    written = None
    beside = path.with_name(path.name + ".partial")
    with open(beside, "w", encoding="utf-8") as kept:
        for line, values in _parsed(path):
            step = None if values is None or "event" in values else values.get("step")
            written = (values or {}).get("time", written)
            if values is None:
                broken += 1
            elif isinstance(step, int) and not last_step < step <= resume_step:
                dropped += 1
            else:
                kept.write(line)
                last_step = step if isinstance(step, int) else last_step
        kept.flush()
        os.fsync(kept.fileno())
    if dropped or broken:
        os.replace(beside, path)
        logger.info(
            "%s: dropped %d records after step %d and %d unfinished lines",
            *(path, dropped, resume_step, broken),
        )
    else:
        os.remove(beside)
    return last_step, dropped, written


def json_values(value: Any) -> Any:
    """``value`` in terms of JSON: numbers that are not finite become None, the unknown text."""
    if isinstance(value, dict):
        return {str(key): json_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_values(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _parsed(path: Path) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Each line and its object; None for a line that has none. Blank lines are passed over."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except ValueError:
                values = None
            whole = isinstance(values, dict) and line.endswith("\n")
            yield line, values if whole else None
