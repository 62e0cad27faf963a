"""``anchorcontext inspect``: one window, its documents, mask, layout, and who sends what."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from anchorcontext.cli.common import Outcome, echo, echo_table, is_main_rank, plain_command
from anchorcontext.errors import UserError
from anchorcontext.words import counted

if TYPE_CHECKING:
    from anchorcontext.config import Config
    from anchorcontext.plan import CostModel
    from anchorcontext.watch.inspection import Inspection, ModelTraffic

# Margins of the drawn mask; what is left of the terminal's width holds cells of two characters.
MARGIN_COLUMNS = 32
MOST_BLOCKS = 64
MOST_DOCUMENTS = 40


@plain_command
@click.argument("config_path", metavar="[CONFIG]", required=False, type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--window", "index", default=0, metavar="N", help="Which prepared window; 0 is first."
)
@click.option(
    "--split",
    type=click.Choice(["train", "validation"]),
    default="train",
    show_default=True,
    help="Which prepared windows.",
)
@click.option("--documents", metavar="N,N,...", help="Example documents of these lengths.")
@click.option("--mode", metavar="NAME", help="Attention mode; the config's otherwise.")
@click.option("--sp", type=int, metavar="P", help="Ranks that share the window.")
@click.option("--layout", metavar="NAME", help="Which tokens each rank holds.")
@click.option("--exchange", metavar="NAME", help="How keys reach the queries.")
@click.option("--png", type=click.Path(path_type=Path), metavar="PATH", help="Draw it to PATH.")
@click.option("--all", "show_all", is_flag=True, help="List every document of a long window.")
def command(
    config_path: Path | None,
    overrides: tuple[str, ...],
    index: int,
    split: str,
    documents: str | None,
    mode: str | None,
    sp: int | None,
    layout: str | None,
    exchange: str | None,
    png: Path | None,
    show_all: bool,
) -> Outcome:
    """Show one window: documents, positions, mask, layout, who sends what.

    The window comes from the prepared data of CONFIG, or is an example of --documents, to which
    overrides of attention and positions apply:

    \b
        anchorcontext inspect --documents 7,13,5 --mode anchor --sp 4 --layout zigzag
        anchorcontext inspect --documents 7,13,5 attention.anchor.visible=false
    """
    from anchorcontext.cli.inspect_window import example_window, prepared_window

    if config_path is not None and "=" in config_path.name and not config_path.exists():
        config_path, overrides = None, (str(config_path), *overrides)
    if documents is not None and config_path is not None:
        raise UserError(f"both CONFIG {config_path} and --documents {documents}: give one of them")
    if documents is not None:
        config, window, names = example_window(documents, overrides, mode, 1 if sp is None else sp)
        known = any(text.startswith("attention.precision.") for text in overrides)
    elif config_path is not None:
        from anchorcontext.config import load_config

        config = load_config(config_path, list(overrides))
        window, names = prepared_window(config, split, index, mode)
        known = True
    else:
        given = f"override {overrides[0]!r}, but no window" if overrides else "no window"
        raise UserError(f"{given} given; name a config, or lengths as in --documents 7,13,5")

    from anchorcontext.train.costs import plan_options
    from anchorcontext.watch.draw import draw_window
    from anchorcontext.watch.inspection import attention_precision, inspect_window

    sp = config.parallel.sp if sp is None else sp
    model, cost = (None, None) if documents is not None else _model(config, sp)
    attention = config.attention
    chosen = {"layout": layout or attention.layout, "exchange": exchange or attention.exchange}
    inspection = inspect_window(
        window,
        sp=sp,
        names=names,
        model=model,
        precision=attention_precision(config) if known else None,
        **plan_options(attention.model_copy(update=chosen), cost),
    )
    _show(inspection, show_all)
    if png is not None and is_main_rank():
        draw_window(inspection, png)
        echo(f"drawn to {png}")
    return Outcome(inspection.as_dict())


def _model(config: Config, sp: int) -> tuple[ModelTraffic | None, CostModel | None]:
    """What the configured model sends for a row, and its costs on ``sp`` ranks; nothing, with a
    word, when its config cannot be read."""
    from anchorcontext.estimate.shape import configured_sizes
    from anchorcontext.train.costs import (
        GRADIENT_SIZE,
        attention_element_size,
        cost_model,
        passes_of,
    )
    from anchorcontext.watch.inspection import ModelTraffic

    try:
        sizes = configured_sizes(config)
    except UserError as error:
        echo(f"bytes are not counted, the model's config cannot be read: {error}")
        return None, None
    passes = passes_of(config, sizes)
    traffic = ModelTraffic(
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        element_size=attention_element_size(config),
        gradient_size=GRADIENT_SIZE,
        forwards=passes.attention,
        swaps=passes.swaps,
    )
    parallel = config.parallel.model_copy(update={"sp": sp})
    return traffic, cost_model(config.model_copy(update={"parallel": parallel}), sizes)


def _show(inspection: Inspection, show_all: bool) -> None:
    from anchorcontext.watch.draw_text import ASCII, UNICODE, mask_text

    window, plan = inspection.window, inspection.plan
    echo(
        f"{counted(window.num_tokens, 'token')}, mode {window.mode}, "
        f"{counted(window.num_targets, 'target')}, "
        f"{counted(inspection.pairs, 'visible pair')} = {inspection.density:.2%} of full "
        "causal attention"
    )
    if inspection.anchor_token is not None:
        echo(f"the anchor is token id {inspection.anchor_token}")
    if inspection.precision is not None:
        parts = ", ".join(f"{part} {dtype}" for part, dtype in inspection.precision.items())
        echo(f"attention computes in: {parts}")
    _show_documents(inspection, show_all)
    columns = shutil.get_terminal_size((MARGIN_COLUMNS + 2 * 40, 24)).columns
    blocks = min(max((columns - MARGIN_COLUMNS) // 2, 16), MOST_BLOCKS)
    encoding = (sys.stdout.encoding or "ascii").lower().replace("-", "")
    echo(mask_text(inspection, blocks, UNICODE if encoding.startswith("utf") else ASCII))
    echo()
    echo(
        f"backend {inspection.backend}, layout {plan.layout}, exchange {plan.exchange_name}, "
        f"{counted(plan.sp_size, 'rank')} of {counted(plan.local_length, 'row')}; the busiest has "
        f"{inspection.balance:.3f} x the mean work"
    )
    if plan.choice is not None:
        echo(f"exchange auto, a layer's step: {plan.choice.reason}")
    _show_ranks(inspection)
    if plan.sp_size > 1:
        share = inspection.rows_moved / inspection.rows_unpruned
        echo(
            f"a forward of one layer moves {counted(inspection.rows_moved, 'key row')}, "
            f"{share:.2%} of the {inspection.rows_unpruned:,} of an unpruned ring"
        )


def _show_documents(inspection: Inspection, show_all: bool) -> None:
    rows = inspection.documents
    masks = any(row.masked for row in rows)
    shown = rows if show_all else rows[:MOST_DOCUMENTS]
    echo_table(
        [
            (
                row.document,
                row.name,
                row.start,
                row.stop,
                row.length,
                f"{row.share:.2%}",
                f"{row.first_position:,}..{row.last_position:,}",
                row.targets,
                *((row.masked,) if masks else ()),
            )
            for row in shown
        ],
        (
            "document",
            "name",
            "start",
            "stop",
            "length",
            "share",
            "positions",
            "targets",
            *(("masked",) if masks else ()),
        ),
    )
    if len(shown) < len(rows):
        echo(f"... and {len(rows) - len(shown)} more; --all lists them")


def _show_ranks(inspection: Inspection) -> None:
    echo_table(
        [
            (
                row.rank,
                "  ".join(f"{start:,}..{stop:,}" for start, stop in row.holds),
                row.tokens,
                row.padding,
                row.tiles,
                row.pairs,
                row.load,
                row.rows_sent,
                row.rows_received,
                row.gradient_rows_sent,
                *(() if row.bytes_sent is None else (row.bytes_sent,)),
            )
            for row in inspection.ranks
        ],
        (
            "rank",
            "holds tokens",
            "real",
            "padding",
            "tiles",
            "pairs",
            "load",
            "key rows sent",
            "received",
            "gradient rows",
            *(() if inspection.ranks[0].bytes_sent is None else ("bytes sent a step",)),
        ),
    )
