"""``diagnose report``: everything under OUT as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from ..config.yaml_io import to_yaml
from ..errors import UserError, writing
from ..watch.page import figures, inline_svg, page, table, write_page
from .sheet import FIGURES, SUFFIX, Sheet, cell, read_sheets

TITLE = "Precision: does it break RoPE?"
# In the order in which they build on each other.
ORDER = ("shift", "first-token", "rope", "gradients")
NOTE = (
    "Readings are sentences made from the numbers below them; nothing is written in advance. Their "
    "thresholds are constants of anchorcontext/precision/*/sheet.py."
)


def write_report(out: Path, path: Path) -> list[str]:
    """Write the page of what lies in ``out``; gives the names of the diagnoses on it.

    Raises:
        UserError: no diagnosis has left a sheet there; ``path`` cannot be written.
    """
    sheets = read_sheets(out)
    if not sheets:
        raise UserError(
            f"{out}: no results there (no *{SUFFIX}); run `anchorcontext diagnose shift`, rope, "
            "first-token or gradients with --out on it first"
        )
    sheets.sort(key=lambda s: (ORDER.index(s.name) if s.name in ORDER else len(ORDER), s.name))
    body = [f'<p class="soft">{NOTE}</p>']
    for sheet in sheets:
        body += _section(sheet, out)
    with writing("--html", path):
        write_page(page(TITLE, body), path)
    return [sheet.name for sheet in sheets]


def _section(sheet: Sheet, out: Path) -> Iterator[str]:
    yield f"<h2>{escape(sheet.title)}</h2>"
    made = "; ".join(sheet.made)
    yield f'<p class="soft"><code>{escape(sheet.command)}</code><br>{escape(made)}</p>'
    readings = "".join(f"<li>{escape(reading)}</li>" for reading in sheet.readings)
    yield f"<ul>{readings}</ul>"
    drawn = {
        title: inline_svg(path.read_text(encoding="utf-8"), title)
        for name, title in sheet.figures.items()
        if (path := out / FIGURES / f"{name}.svg").exists()
    }
    if drawn:
        yield figures(drawn)
    for one in sheet.tables:
        rows = [[cell(value) for value in row] for row in one.rows]
        yield f"<details><summary>{escape(one.title)}</summary>{table(rows, one.headers)}</details>"
    settings = escape(to_yaml(sheet.settings))
    yield f"<details><summary>Settings</summary><pre>{settings}</pre></details>"
