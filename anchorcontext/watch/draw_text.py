"""A window's mask as text: queries down, keys across."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..words import counted
from .inspection import Inspection
from .mask_grid import mask_grid


@dataclass(frozen=True)
class Characters:
    """What a cell looks like; each stands for one block of queries and keys."""

    hidden: str
    shades: tuple[str, str, str]
    """Up to a third, two thirds, and less than all of what causality allows."""
    full: str
    bar: str


UNICODE = Characters(hidden="·", shades=("░", "▒", "▓"), full="█", bar="│")
ASCII = Characters(hidden=".", shades=("-", "+", "*"), full="#", bar="|")


def mask_text(
    inspection: Inspection, num_blocks: int = 40, characters: Characters = UNICODE
) -> str:
    """Draw the mask, two characters a cell, with each row's first token, documents and ranks.

    Under a mode with an anchor, the first column is token 0 alone, so that it shows in a window of
    any length.
    """
    window, plan = inspection.window, inspection.plan
    grid = mask_grid(window.mode, window.doc_ids, num_blocks)
    starts, stops = grid.edges[:-1], grid.edges[1:]
    owner = _owner_of_tokens(inspection)
    fraction = grid.fraction
    margins = [
        (f"{start}", _span(window.doc_ids[start:stop]), _span(owner[start:stop]))
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
    ]
    heads = ("token", "document", "rank")
    widths = [max(len(row[i]) for row in [heads, *margins]) for i in range(3)]
    lines = [_legend(int(np.diff(grid.edges).max()), characters)]
    if window.mode.anchor:
        lines.append("first column: the anchor, token 0 alone")
    lines.append("  ".join(head.rjust(width) for head, width in zip(heads, widths, strict=True)))
    for row, margin in enumerate(margins):
        left = "  ".join(text.rjust(width) for text, width in zip(margin, widths, strict=True))
        cells = [2 * _cell(value, characters) for value in fraction[row, : row + 1]]
        lines.append(f"{left} {characters.bar}{''.join(cells)}")
    if plan.sp_size == 1:
        return "\n".join(lines)
    left = " " * (sum(widths) + 2 * len(heads) - 1) + characters.bar
    last_digit = [owner[start] % 10 for start in starts]
    lines.append(
        left + "".join(f" {digit}" for digit in last_digit) + "  rank of the key (last digit)"
    )
    return "\n".join(lines)


def _cell(fraction: float, characters: Characters) -> str:
    if fraction == 0:
        return characters.hidden
    if fraction == 1:
        return characters.full
    return characters.shades[min(int(3 * fraction), 2)]


def _legend(tokens: int, characters: Characters) -> str:
    light, medium, dark = characters.shades
    shades = "" if tokens == 1 else f"{light}{medium}{dark} part, "
    return (
        f"queries down, keys across, a cell is {counted(tokens, 'token')}: {characters.full} all "
        f"that causality allows, {shades}{characters.hidden} nothing"
    )


def _span(values: np.ndarray) -> str:
    """``3`` or ``3-7``: the numbers of a block from the smallest to the largest."""
    low, high = int(values.min()), int(values.max())
    return str(low) if low == high else f"{low}-{high}"


def _owner_of_tokens(inspection: Inspection) -> np.ndarray:
    """int64 (L,): the rank that holds each token."""
    owner = np.empty(inspection.plan.padded_length, dtype=np.int64)
    for start, stop, rank in inspection.plan.runs[0].tolist():
        owner[start:stop] = rank
    return owner[: inspection.window.num_tokens]
