"""A run as one HTML page that needs nothing else: figures inline, no scripts, nothing loaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..config.yaml_io import to_yaml
from .history import PARTS, PROBLEMS, RunHistory, local_time, read_run, seconds_of
from .redact import redact
from .run_figures import SMALLEST, run_figures
from .summary import summary_rows

MOST_EVENTS = 500
"""The newest ones are listed; a run of a week has thousands of checkpoints."""
_TILES = ("steps", "loss, first -> last", "tokens/s, median step", "peak memory of a rank")
_SHOWN_ELSEWHERE = ("event", "time", "step", "versions", "commit")

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --text: #1c1f23; --soft: #667; --line: #dde;
  --c0: #0072b2; --c1: #d98200; --c2: #009e73; --c3: #b5669a; --c4: #8a8f98; --c5: #d1350f; }
@media (prefers-color-scheme: dark) { :root { --paper: #15181c; --text: #e4e7eb; --soft: #9aa3ad;
  --line: #31363d; --c0: #56b4e9; --c1: #e6a52e; --c2: #2fc495; --c3: #d98cc0; --c4: #79818c;
  --c5: #ff7850; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 74rem; padding: 1rem; background: var(--paper);
  color: var(--text); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
.soft { color: var(--soft); }
.tiles, .figures { display: grid; gap: 1rem; margin: 1rem 0; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); }
.figures { grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
.tile, figure { border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .8rem;
  margin: 0; }
.tile b { display: block; font-size: 1.1rem; } figcaption { font-size: .9rem; font-weight: 600; }
svg { width: 100%; height: auto; display: block; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .25rem 1rem .25rem 0;
  border-bottom: 1px solid var(--line); } th { white-space: nowrap; }
tr.wrong td { color: var(--c5); } pre { overflow-x: auto; font-size: .85rem; }
summary { cursor: pointer; }
"""


def write_run_report(run_dir: str | Path, path: str | Path) -> None:
    """Write the report of a run, beside and then renamed.

    Raises:
        UserError: the folder holds no metrics, or matplotlib is not installed.
        OSError: ``path`` cannot be written.
    """
    page, path = run_page(read_run(run_dir)), Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text(page, encoding="utf-8")
    beside.replace(path)


def run_page(run: RunHistory) -> str:
    """The whole page."""
    title = escape(run.name)
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{title}</h1>",
            *_head(run),
            *_figures(run),
            "<h2>Seconds of the steps, by part</h2>",
            *_seconds(run),
            "<h2>In numbers</h2>",
            _table(summary_rows(run.summary)),
            "<h2>Starts</h2>",
            *_starts(run),
            "<h2>Events</h2>",
            *_events(run),
            "<h2>Made by</h2>",
            _table(_made_by(run)),
            "<h2>Config</h2>",
            _config(run),
            "</body></html>\n",
        ]
    )


def _head(run: RunHistory) -> list[str]:
    total = f" of {run.total_steps:,}" if run.total_steps else ""
    state = f"{run.state}; step {run.summary.steps:,}{total}, written {local_time(run.written)}"
    rows = dict(summary_rows(run.summary))
    tiles = [
        f'<div class="tile"><span class="soft">{escape(name)}</span>'
        f"<b>{escape(rows[name])}</b></div>"
        for name in _TILES
    ]
    return [f'<p class="soft">{escape(state)}</p>', '<div class="tiles">', *tiles, "</div>"]


def _figures(run: RunHistory) -> list[str]:
    figures = [
        f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>"
        for title, svg in run_figures(run).items()
    ]
    if not figures:
        return ["<p>No step was recorded yet.</p>"]
    legend = (
        "Dotted lines: the run went on from a checkpoint. Crosses: a step was not applied, or "
        "something was wrong. Long runs are drawn as means, in a band from least to most. "
        f"A logit difference of 0 is drawn at {SMALLEST:g}."
    )
    return ['<div class="figures">', *figures, "</div>", f'<p class="soft">{legend}</p>']


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
    return [_table(rows, head), f'<p class="soft">{note}</p>']


def _starts(run: RunHistory) -> list[str]:
    rows = [
        (
            local_time(start.get("time")),
            start.get("step"),
            start.get("ranks"),
            start.get("superseded", 0),
            str(start.get("commit") or "-")[:12],
            start["ended"],
        )
        for start in run.starts
    ]
    return [_table(rows, ("time", "after step", "ranks", "steps repeated", "commit", "ended"))]


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
    note = [f'<p class="soft">{left_out:,} older ones are left out.</p>'] if left_out else []
    return [*note, _table(rows, ("time", "event", "step", "what"), wrong)]


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


def _table(
    rows: Iterable[Sequence[Any]], head: Sequence[str] = (), wrong: Sequence[bool] = ()
) -> str:
    lines = ["".join(f"<th>{escape(name)}</th>" for name in head)] if head else []
    lines = [f"<tr>{line}</tr>" for line in lines]
    for index, row in enumerate(rows):
        cells = "".join(f"<td>{escape('-' if c is None else str(c))}</td>" for c in row)
        mark = ' class="wrong"' if index < len(wrong) and wrong[index] else ""
        lines.append(f"<tr{mark}>{cells}</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'
