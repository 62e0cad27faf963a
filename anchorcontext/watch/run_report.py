"""A run as one HTML page that needs nothing else: figures inline, no scripts, nothing loaded."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from ..config.yaml_io import to_yaml
from ..words import counted, duration
from .history import PARTS, PROBLEMS, RunHistory, local_time, read_run, seconds_of
from .page import figures, page, table, tiles, write_page
from .redact import redact
from .run_figures import SMALLEST, run_figures
from .summary import summary_rows

MOST_EVENTS = 500
"""The newest ones are listed; a run of a week has thousands of checkpoints."""
_TILES = ("steps", "loss, first -> last", "tokens/s, median step", "peak memory of a rank")
_SHOWN_ELSEWHERE = ("event", "time", "step", "versions", "commit")


def write_run_report(run_dir: str | Path, path: str | Path) -> None:
    """Write the report of a run, beside and then renamed.

    Raises:
        UserError: the folder holds no metrics, or matplotlib is not installed.
        OSError: ``path`` cannot be written.
    """
    write_page(run_page(read_run(run_dir)), path)


def run_page(run: RunHistory) -> str:
    """The whole page."""
    return page(
        run.name,
        [
            *_head(run),
            *_figures(run),
            "<h2>Seconds of the steps, by part</h2>",
            *_seconds(run),
            "<h2>In numbers</h2>",
            table(summary_rows(run.summary)),
            "<h2>Starts</h2>",
            *_starts(run),
            "<h2>Events</h2>",
            *_events(run),
            "<h2>Made by</h2>",
            table(_made_by(run)),
            "<h2>Config</h2>",
            _config(run),
        ],
    )


def _head(run: RunHistory) -> list[str]:
    total = f" of {run.total_steps:,}" if run.total_steps else ""
    state = f"{run.state}; step {run.summary.steps:,}{total}, written {local_time(run.written)}"
    rows = dict(summary_rows(run.summary))
    return [f'<p class="soft">{escape(state)}</p>', tiles((name, rows[name]) for name in _TILES)]


def _figures(run: RunHistory) -> list[str]:
    drawn = run_figures(run)
    if not drawn:
        return ["<p>No step was recorded yet.</p>"]
    legend = (
        "Dotted lines: the run went on from a checkpoint. Crosses: a step was not applied, or "
        "something was wrong. Long runs are drawn as means, in a band from least to most. "
        f"A logit difference of 0 is drawn at {SMALLEST:g}."
    )
    return [figures(drawn), f'<p class="soft">{legend}</p>']


def _seconds(run: RunHistory) -> list[str]:
    if not run.records:
        return ["<p>-</p>"]
    parts = [seconds_of(record) for record in run.records]
    totals = {name: sum(part[name] for part in parts) for name in PARTS}
    whole = sum(totals.values()) or 1.0
    rows = [
        (name, f"{seconds:,.1f} s", f"{seconds / len(parts):,.3g} s", f"{seconds / whole:.1%}")
        for name, seconds in totals.items()
    ]
    note = (
        "compute: forward and backward. exchange: waiting for rows of other ranks. other: waiting "
        "for the slowest rank, guards, this record. Means over ranks; saving and evaluation come "
        "on top."
    )
    head = ("part", "all steps", "a step", "share")
    return [table(rows, head), f'<p class="soft">{note}</p>']


def _starts(run: RunHistory) -> list[str]:
    rows = [
        (
            local_time(start.get("time")),
            start.get("step"),
            start.get("ranks"),
            duration(start.get("seconds_down")),
            start.get("superseded", 0),
            str(start.get("commit") or "-")[:12],
            start["ended"],
        )
        for start in run.starts
    ]
    note = (
        "down before: from the last line of the process before to the start, most of start-up "
        f"included; {duration(run.seconds_down)} in all."
    )
    head = ("time", "after step", "ranks", "down before", "steps repeated", "commit", "ended")
    return [table(rows, head), f'<p class="soft">{note}</p>']


def _events(run: RunHistory) -> list[str]:
    listed = run.events[-MOST_EVENTS:]
    rows = [
        (
            local_time(event.get("time")),
            event["event"],
            event.get("step"),
            "; ".join(
                f"{key} {value}"
                for key, value in redact(event).items()
                if key not in _SHOWN_ELSEWHERE
            ),
        )
        for event in listed
    ]
    wrong = [
        event["event"] in PROBLEMS or (event["event"] == "parity" and not event.get("passed"))
        for event in listed
    ]
    left_out = len(run.events) - len(listed)
    note = [f'<p class="soft">Left out: {counted(left_out, "older one")}.</p>'] if left_out else []
    return [*note, table(rows, ("time", "event", "step", "what"), wrong)]


def _made_by(run: RunHistory) -> list[tuple[str, Any]]:
    made_by = run.made_by
    versions = made_by.get("versions")
    rows = [(name, made_by.get(name)) for name in ("commit", "device", "ranks", "dp", "sp")]
    return rows + (list(versions.items()) if isinstance(versions, dict) else [])


def _config(run: RunHistory) -> str:
    if run.config is None:
        return "<p>The folder holds no config.yaml that can be read.</p>"
    text = escape(to_yaml(run.config))
    return f"<details><summary>Every key, as resolved</summary><pre>{text}</pre></details>"
