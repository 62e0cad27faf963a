"""What a diagnosis shows: one sheet for the terminal, JSON, docs/precision.md and the HTML report.

A run leaves its sheet in ``OUT/NAME.sheet.json`` and its figures in ``OUT/figures``, so that
``diagnose report OUT`` needs nothing but OUT.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import writing
from ..markdown import markdown_table
from .units import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)
SUFFIX = ".sheet.json"
FIGURES = "figures"
# A column holds more than its due from this multiple of an equal share on.
STANDS_OUT = 3.0
# Thresholds of readings: "grows" and "falls" begin at the first ratio, or its inverse; a number is
# larger than another from the second on.
CLEAR, LARGER = 1.5, 1.25


@dataclass(frozen=True)
class Table:
    """A table with the sentence that says what its numbers are."""

    title: str
    headers: list[str]
    rows: list[list[Any]]


@dataclass(frozen=True)
class Sheet:
    """One diagnosis.

    Attributes:
        name: of its command.
        title: what it asks.
        command: that gives these numbers.
        made: processor, versions and dates; what it took.
        settings: everything that decides the numbers.
        readings: sentences made from the numbers.
        tables: what they are made from.
        figures: file names under OUT/figures, without ending, and their titles.
        brief: tables for a terminal and a Markdown page, where ``tables`` are too long for them.
    """

    name: str
    title: str
    command: str
    made: list[str]
    settings: dict[str, Any]
    readings: list[str]
    tables: list[Table]
    figures: dict[str, str] = field(default_factory=dict)
    brief: list[Table] = field(default_factory=list)


def save_sheet(sheet: Sheet, out: Path) -> None:
    """Leave ``sheet`` in ``out`` for the report.

    Raises:
        UserError: the folder cannot be written.
    """
    write_whole(out / f"{sheet.name}{SUFFIX}", asdict(sheet))


def read_sheets(out: Path) -> list[Sheet]:
    """The sheets that lie in ``out``, by name; what cannot be read is left out with a warning."""
    sheets = []
    for path in sorted(out.glob(f"*{SUFFIX}")):
        try:
            raw = json.loads(path.read_text())
            for tables in ("tables", "brief"):
                raw[tables] = [Table(**table) for table in raw.get(tables, ())]
            sheets.append(Sheet(**raw))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            name = path.name.removesuffix(SUFFIX)
            logger.warning(
                "%s cannot be read (%s): left out; write it again with `anchorcontext diagnose %s "
                "... --stored`",
                path,
                error,
                name,
            )
    return sheets


def save_figures(figures: Mapping[str, Figure], folder: Path) -> list[Path]:
    """Each as ``folder``/NAME.png and .svg, the same bytes for the same picture; gives the PNGs."""
    import matplotlib

    from ..watch.draw import save_figure

    paths = []
    for name, figure in figures.items():
        # Ids in an SVG are random without a salt.
        with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
            path = folder / f"{name}.png"
            save_figure(figure, path)
            figure.set_layout_engine("none")  # the SVG is laid out as the PNG
            figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
        paths.append(path)
    return paths


def copy_figures(drawn: Sequence[Path], folder: Path) -> list[Path]:
    """Figures, PNG and SVG, beside a page; gives the PNGs there.

    Raises:
        UserError: ``folder`` cannot be written.
    """
    with writing("figures", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path in drawn:
            for file in (path, path.with_suffix(".svg")):
                if file.parent.resolve() != folder.resolve():
                    shutil.copyfile(file, folder / file.name)
    return [folder / path.name for path in drawn]


def sheet_markdown(sheet: Sheet, figures: Sequence[Path], folder: Path) -> str:
    """The sheet as a section of a Markdown page in ``folder``."""
    parts = [f"## {sheet.title}", f"Written by `{sheet.command}`. {'; '.join(sheet.made)}."]
    parts.append("\n".join(f"- {reading}" for reading in sheet.readings))
    for table in sheet.brief or sheet.tables:
        rows = [[cell(value) for value in row] for row in table.rows]
        parts += [f"**{table.title}**", markdown_table(table.headers, rows)]
    for path in figures:
        link = path.relative_to(folder) if path.is_relative_to(folder) else path
        parts.append(f"![{path.stem.replace('-', ' ')}]({link})")
    return "\n\n".join(parts)


def trend(ratio: float) -> str:
    """What a number does from one place to another, in words."""
    if ratio >= CLEAR:
        return f"grows {ratio:.3g} times"
    if ratio <= 1 / CLEAR:
        return f"falls to {ratio:.2g} of it"
    return f"stays within a factor of {CLEAR} ({ratio:.2f})"


def cell(value: Any) -> str:
    """A number with three digits, thousands apart; anything else as it is."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value)
