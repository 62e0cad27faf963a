"""Where ``anchorcontext evaluate`` leaves what it found: result files, and a page."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from anchorcontext.cli.common import echo, option_group, write_json
from anchorcontext.errors import writing

if TYPE_CHECKING:
    from anchorcontext.evaluate.target import Target

result_options = option_group(
    "results",
    output=click.option(
        "--output",
        type=click.Path(path_type=Path, file_okay=False),
        default=Path("runs/evaluation"),
        show_default=True,
        help="Every finished unit is kept here, and not computed again.",
    ),
    page=click.option(
        "--markdown",
        "page",
        type=click.Path(path_type=Path, dir_okay=False),
        help="Write the tables into this page too, between the markers of --section.",
    ),
    section=click.option(
        "--section",
        default="evaluation",
        show_default=True,
        help="Name of the markers in that page.",
    ),
)


@dataclass(frozen=True)
class Part:
    """What one kind of task found."""

    report: Any
    """What was asked for; goes into ``--json``."""
    markdown: str
    """The same for ``--markdown``; empty: nothing of it has a score."""
    kept: Any
    """With what earlier calls found; goes into ``results.json``. Empty: nothing has a score."""
    kept_markdown: str
    """The same for ``results.md``."""
    complete: bool = True
    """Everything that was asked for has a score."""


def write_results(parts: dict[str, Part], targets: Sequence[Target], output: Path) -> None:
    """Put what has scores into the result files. Kinds of tasks that were not asked for now stay
    there as they are, if they are of the same weights."""
    from anchorcontext.markdown import write_section

    scored = {kind: part for kind, part in parts.items() if part.kept}
    data, tables = output / "results.json", output / "results.md"
    if not scored:
        echo(f"nothing was scored; {data} and {tables} stay as they are")
        return
    weights = {"weights": {target.name: target.digest() for target in targets}}
    with writing("--output", output):
        old = _written_before(data)
        if {key: old.get(key) for key in weights} != weights:
            old = {}
            tables.unlink(missing_ok=True)
        write_json(data, old | weights | {kind: part.kept for kind, part in scored.items()})
        for kind, part in scored.items():
            write_section(tables, kind, part.kept_markdown)
    echo(f"written: {data}, {tables}")


def _written_before(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def write_page(parts: dict[str, Part], page: Path, section: str) -> None:
    """What was asked for, beside the command that asked; nothing, if nothing has a score."""
    from anchorcontext.markdown import write_section

    texts = [part.markdown for part in parts.values() if part.markdown]
    if texts:
        with writing("--markdown", page):
            write_section(page, section, "\n\n".join([_provenance(), *texts]))
        echo(f"written: {page}")


def _provenance() -> str:
    """The command, the machine, the date and the versions, for a page."""
    from anchorcontext.environment import measured_on
    from anchorcontext.evaluate.harness.units import versions

    command = shlex.join(["anchorcontext", *sys.argv[1:]])
    found = {name: number for name, number in versions().items() if name != "torch"}
    packages = ", ".join(f"{name} {number}" for name, number in found.items())
    return f"`{command}`\n\n{measured_on()}, {packages}."
