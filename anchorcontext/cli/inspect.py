"""``anchorcontext inspect``: one window, its documents, mask, layout, and who sends what."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from anchorcontext.cli.common import Outcome, echo, echo_table, is_main_rank, plain_command
from anchorcontext.errors import UserError

if TYPE_CHECKING:
    from anchorcontext.config import Config
    from anchorcontext.plan import CostModel
    from anchorcontext.watch.inspection import Inspection, ModelTraffic
    from anchorcontext.window import Window

# Margins of the drawn mask; what is left of the terminal's width holds cells of two characters.
MARGIN_COLUMNS = 32
MOST_BLOCKS = 64
MOST_DOCUMENTS = 40
COPY_NAME = "copy of the anchor"


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
@click.option("--documents", metavar="N,N,...", help="Documents of these lengths, without CONFIG.")
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

    The window comes from the prepared data of CONFIG, or, without data, from --documents:

        anchorcontext inspect --documents 7,13,5 --mode anchor --sp 4 --layout zigzag
    """
    if documents is not None and config_path is not None:
        raise UserError(f"both CONFIG {config_path} and --documents {documents}: give one of them")
    names: Callable[[int], str] | None = None
    model: ModelTraffic | None = None
    cost: CostModel | None = None
    backend, precision = "native", None
    if documents is not None:
        window = _example_window(documents, mode or "anchor")
    elif config_path is not None:
        from anchorcontext.config import load_config

        config = load_config(config_path, list(overrides))
        window, names = _prepared_window(config, split, index, mode)

        from anchorcontext.watch.inspection import attention_precision

        sp = config.parallel.sp if sp is None else sp
        model, cost = _model(config, sp)
        layout = layout or config.attention.layout
        exchange = exchange or config.attention.exchange
        backend, precision = config.attention.backend, attention_precision(config)
    else:
        raise UserError("no window given; name a config, or lengths as in --documents 7,13,5")

    from anchorcontext.watch.draw import draw_window
    from anchorcontext.watch.inspection import inspect_window

    inspection = inspect_window(
        window,
        sp=1 if sp is None else sp,
        layout=layout or "auto",
        exchange=exchange or "auto",
        names=names,
        model=model,
        cost=cost,
        backend=backend,
        precision=precision,
    )
    _show(inspection, show_all)
    if png is not None and is_main_rank():
        draw_window(inspection, png)
        echo(f"drawn to {png}")
    return Outcome(inspection.as_dict())


def _example_window(documents: str, mode: str) -> Window:
    """A window of documents of the given lengths, behind an anchor where the mode has one."""
    from anchorcontext.modes import get_mode
    from anchorcontext.window import Window

    try:
        lengths = [int(length) for length in documents.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise UserError(
            f"--documents {documents!r}: give lengths of at least one token, as in 7,13,5"
        )
    anchor = 0 if get_mode(mode).has_anchor else None
    return Window.from_documents([[0] * length for length in lengths], anchor, mode)


def _prepared_window(
    config: Config, split: str, index: int, mode: str | None
) -> tuple[Window, Callable[[int], str]]:
    """Window ``index`` of the config's prepared data, and what to call its runs."""
    import numpy as np

    from anchorcontext.data import View, WindowDataset, configured_view
    from anchorcontext.data.store import ANCHOR_DOCUMENT, COPY_START
    from anchorcontext.modes import get_mode

    dataset = WindowDataset(config.data.path, split)
    if not 0 <= index < len(dataset):
        raise UserError(
            f"--window {index}: {dataset.path} holds windows 0 to {len(dataset) - 1}; choose one"
        )
    record = dataset[index]
    # Under another mode than the config's its controls may have no meaning.
    view = configured_view(config, dataset) if mode is None else View(get_mode(mode))
    window = view.window(record)
    runs = np.arange(len(window.segment_docs))
    if view.anchor_copies:  # instead of the record's run 0
        copies = window.run_is_copy
        runs = np.where(copies, -1, np.cumsum(~copies))

    def name(run: int) -> str:
        if runs[run] < 0:
            return COPY_NAME
        row, start = int(record.documents[runs[run]]), int(record.starts[runs[run]])
        if row == ANCHOR_DOCUMENT:
            return "anchor"
        if start == COPY_START:
            return COPY_NAME
        document = dataset.document(row)
        cut = f" [{start:,}..]" if start else ""
        return f"{document.source}/{document.name}{cut}"

    return window, name


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
        f"{window.num_tokens:,} tokens, mode {window.mode}, {window.num_targets:,} targets, "
        f"{inspection.pairs:,} visible pairs = {inspection.density:.2%} of full causal attention"
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
        f"{plan.sp_size} ranks of "
        f"{plan.local_length:,} rows; the busiest has {inspection.balance:.3f} x the mean work"
    )
    if plan.choice is not None:
        echo(f"exchange auto, a layer's step: {plan.choice.reason}")
    _show_ranks(inspection)
    if plan.sp_size > 1:
        share = inspection.rows_moved / inspection.rows_unpruned
        echo(
            f"a forward of one layer moves {inspection.rows_moved:,} key rows, {share:.2%} of the "
            f"{inspection.rows_unpruned:,} of an unpruned ring"
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
