"""An HTML page that needs nothing else: its style inline, no scripts, nothing loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..files import written_whole

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


def page(title: str, body: Iterable[str]) -> str:
    """A whole page of parts that are HTML already."""
    title = escape(title)
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{title}</h1>",
            *body,
            "</body></html>\n",
        ]
    )


def write_page(text: str, path: str | Path) -> None:
    """Write a page; who reloads it meanwhile sees the old one.

    Raises:
        OSError: ``path`` cannot be written.
    """
    with written_whole(Path(path)) as beside:
        beside.write_text(text, encoding="utf-8")


def tiles(rows: Iterable[tuple[str, str]]) -> str:
    """A few figures that matter most: what, and how much."""
    shown = [
        f'<div class="tile"><span class="soft">{escape(name)}</span><b>{escape(value)}</b></div>'
        for name, value in rows
    ]
    return "\n".join(['<div class="tiles">', *shown, "</div>"])


def inline_svg(svg: str, title: str) -> str:
    """The ``<svg>`` element of a whole SVG file, as wide as its place."""
    head, rest = svg[svg.index("<svg") :].split(">", 1)
    head = re.sub(r' (width|height|version|xmlns(:\w+)?)="[^"]*"', "", head)
    head = head.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)
    return f"{head}>{re.sub(r'<metadata>.*?</metadata>', '', rest, flags=re.DOTALL)}"


def figures(drawn: Mapping[str, str]) -> str:
    """Pictures side by side, title -> ``<svg>``."""
    shown = [
        f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>"
        for title, svg in drawn.items()
    ]
    return "\n".join(['<div class="figures">', *shown, "</div>"])


def table(
    rows: Iterable[Sequence[Any]], head: Sequence[str] = (), wrong: Sequence[bool] = ()
) -> str:
    """Rows of text; those that are ``wrong`` stand out, None is a dash."""
    lines = ["".join(f"<th>{escape(name)}</th>" for name in head)] if head else []
    lines = [f"<tr>{line}</tr>" for line in lines]
    for index, row in enumerate(rows):
        cells = "".join(f"<td>{escape('-' if c is None else str(c))}</td>" for c in row)
        mark = ' class="wrong"' if index < len(wrong) and wrong[index] else ""
        lines.append(f"<tr{mark}>{cells}</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'
