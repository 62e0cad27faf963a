"""Markdown that commands write: tables, and sections of a page between marker comments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from .files import written_whole


def write_section(path: Path, name: str, text: str) -> None:
    """Put ``text`` between the markers of section ``name``; made at the page's end if missing.

    A page that is missing is made too, titled by its file's name. Its readers never see half of it.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    section = f"{begin}\n{text.strip()}\n{end}"
    page = path.read_text() if path.exists() else f"# {path.stem.capitalize()}\n"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if pattern.search(page):
        page = pattern.sub(lambda _: section, page)
    else:
        page = f"{page.rstrip()}\n\n{section}\n"
    with written_whole(path) as beside:
        beside.write_text(page)


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; every column but the first is right-aligned."""
    lines = [_row(headers), _row([":--", *["--:"] * (len(headers) - 1)])]
    return "\n".join([*lines, *(_row(row) for row in rows)])


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"
