"""``anchorcontext evaluate --tasks loss-by-position``: the table, the figure, the section."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from anchorcontext.cli.common import echo_table, is_main_rank
from anchorcontext.cli.evaluate import Part
from anchorcontext.errors import writing

if TYPE_CHECKING:
    from anchorcontext.evaluate.by_position import PositionOptions
    from anchorcontext.evaluate.target import Target

FIGURE = "loss_by_position.png"


def run_by_position(
    targets: Sequence[Target],
    options: PositionOptions,
    output: Path,
    say: Callable[[str], None],
) -> Part:
    """Loss by position of every model, over all ranks of the launcher; prints the table."""
    from anchorcontext.evaluate.by_position import (
        draw_positions,
        measure_positions,
        position_table,
        report_markdown,
    )

    reports = measure_positions(targets, options, output)
    head, rows, note = position_table(reports)
    echo_table(rows, head)
    say(note)
    if is_main_rank():
        with writing("--output", output):
            draw_positions(reports, output / FIGURE)
    say(f"written: {output / FIGURE}")
    text = report_markdown(reports)
    return Part(reports, text, reports, text)
