"""The task loss-by-position: its options, the run, the table, the figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from anchorcontext.cli.common import echo_table, is_main_rank, option_group
from anchorcontext.cli.evaluate.results import Part
from anchorcontext.errors import writing

if TYPE_CHECKING:
    from anchorcontext.evaluate.target import Target

FIGURE = "loss_by_position.png"

position_options = option_group(
    "positions",
    texts=click.option(
        "--documents",
        "texts",
        multiple=True,
        metavar="PATH",
        help="Texts for loss-by-position, as data.sources takes them, or stdlib; may be repeated. "
        "Default: the validation split of the model's run.",
    ),
    documents=click.option(
        "--num-documents",
        "documents",
        type=click.IntRange(min=1),
        default=8,
        show_default=True,
        help="Of them, that are long enough.",
    ),
    short=click.option(
        "--short",
        type=click.IntRange(min=4),
        default=4096,
        show_default=True,
        help="Tokens of the short context that loss-by-position compares with.",
    ),
    sp=click.option(
        "--sp",
        type=click.IntRange(min=1),
        help="Ranks that share a document in loss-by-position; default: all of torchrun's.",
    ),
)
"""Of :class:`anchorcontext.evaluate.by_position.PositionOptions`."""


def run_by_position(
    targets: Sequence[Target],
    length: int,
    dtype: str,
    given: Mapping[str, Any],
    output: Path,
    say: Callable[[str], None],
) -> Part:
    """Loss by position of every model, over all ranks of the launcher; prints the table.

    ``given``: :data:`position_options`.
    """
    from anchorcontext.evaluate.by_position import (
        PositionOptions,
        draw_positions,
        measure_positions,
        position_table,
        report_markdown,
    )

    options = PositionOptions(length=length, dtype=dtype, **given)
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
