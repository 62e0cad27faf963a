"""What the diagnoses share: lists as options, the bar, and where a sheet goes."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from anchorcontext.cli.common import echo, echo_table, is_main_rank
from anchorcontext.errors import UserError
from anchorcontext.words import duration, time_left

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from anchorcontext.precision.sheet import Sheet
    from anchorcontext.precision.units import Step

DEFAULT_OUT = Path("runs/precision")


def result_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--out``, ``--stored``, ``--no-figures`` and ``--markdown``, for :func:`show`."""
    for option in (
        click.option(
            "--markdown",
            type=click.Path(path_type=Path, dir_okay=False),
            metavar="PATH",
            help="Write the readings and tables into their section of PATH, figures beside it.",
        ),
        click.option(
            "--figures/--no-figures",
            default=True,
            show_default=True,
            help="Draw to figures in that folder, with matplotlib.",
        ),
        click.option("--stored", is_flag=True, help="Measure nothing; show what is stored."),
        click.option(
            "--out",
            type=click.Path(path_type=Path, file_okay=False),
            default=DEFAULT_OUT,
            show_default=True,
            help="Where results are kept.",
        ),
    ):
        function = option(function)
    return function


def text_options(*, tokens: str, texts: str) -> Callable[..., Any]:
    """``--tokens``, ``--texts``, ``--source`` and ``--seed``; the help names these defaults."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in (
            click.option(
                "--seed", type=int, metavar="N", help="Of texts and of random numbers; default 0."
            ),
            click.option(
                "--source", metavar="PATH", help="Documents; default the standard library's."
            ),
            click.option(
                "--texts",
                type=int,
                metavar="N",
                help=f"Sequences, default {texts}; more go on from those stored.",
            ),
            click.option(
                "--tokens", type=int, metavar="T", help=f"Tokens of a sequence, default {tokens}."
            ),
        ):
            function = option(function)
        return function

    return add


threads_option = click.option(
    "--threads", type=click.IntRange(min=1), metavar="N", help="CPU threads, default torch's own."
)


def names(text: str) -> tuple[str, ...]:
    """A list of names, ``a,b,c``."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(option: str, text: str) -> tuple[int, ...]:
    """A list of whole numbers, ``0,8,16``.

    Raises:
        UserError: it is none.
    """
    parts = names(text)
    if not parts or not all(part.isdigit() for part in parts):
        raise UserError(f"{option} {text}: give whole numbers, as in 0,8,16")
    return tuple(int(part) for part in parts)


def given_lists(
    given: Mapping[str, Any], of_names: Sequence[str], of_numbers: Sequence[str]
) -> dict[str, Any]:
    """Options that were given, the named ones as lists."""
    changes: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        if name in of_names:
            changes[name] = names(value)
        elif name in of_numbers:
            changes[name] = numbers(f"--{name.replace('_', '-')}", value)
        else:
            changes[name] = value
    return changes


def command_line(name: str, model: str, given: Mapping[str, Any]) -> str:
    """What to type to get these numbers; flags as this command spells them."""
    flags = {p.name: p for p in click.get_current_context().command.params}
    words = ["anchorcontext", "diagnose", name, model]
    for key, value in given.items():
        if isinstance(value, bool):
            words.append((flags[key].opts if value else flags[key].secondary_opts)[0])
        elif value is not None:
            words += [f"--{key.replace('_', '-')}", str(value)]
    return shlex.join(words)


def show(
    sheet: Sheet,
    draw: Callable[[], dict[str, Figure]],
    *,
    out: Path,
    figures: bool,
    markdown: Path | None,
) -> None:
    """Print a sheet, leave it in ``out`` for the report, draw its figures, write its section.

    Readings come first, and of tables that are too long for a page only the brief ones.

    Raises:
        UserError: matplotlib is not installed; a file cannot be written.
    """
    from dataclasses import replace

    from anchorcontext.markdown import write_section
    from anchorcontext.precision.sheet import (
        FIGURES,
        copy_figures,
        save_figures,
        save_sheet,
        sheet_markdown,
    )

    for reading in sheet.readings:
        echo(f"- {reading}")
    for table in sheet.brief or sheet.tables:
        echo(f"\n{table.title}")  # not as the table's own, which wraps at the table's width
        echo_table(table.rows, table.headers)
    if sheet.brief:
        echo(f"every number: `anchorcontext diagnose report {out}`, or --json PATH")
    if not is_main_rank():
        return
    save_sheet(sheet, out)
    drawn = save_figures(draw() if figures else {}, out / FIGURES)
    titles = {path.stem: path.stem.replace("-", " ") for path in drawn}
    save_sheet(replace(sheet, figures=titles), out)
    if drawn:
        echo(f"drawn to {out / FIGURES}: {', '.join(titles)}")
    if markdown is not None:
        beside = copy_figures(drawn, markdown.with_suffix(""))
        write_section(markdown, sheet.name, sheet_markdown(sheet, beside, markdown.parent))
        echo(f"written to {markdown}")


@contextmanager
def progress_bar() -> Iterator[Callable[[Step], None]]:
    """A bar with the time left on a terminal; elsewhere a line whenever a result is stored."""
    import time

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeLeft(elapsed_when_finished=True),
    )
    # The estimate is over all of the run: units differ in speed.
    bar = Progress(
        *columns, console=console, speed_estimate_period=3600, disable=not console.is_terminal
    )
    task = bar.add_task("texts and model", total=None)
    start = time.monotonic()

    def tell(step: Step) -> None:
        bar.update(task, description=step.name, completed=step.done, total=step.total)
        if step.stored and not console.is_terminal:
            elapsed = time.monotonic() - start
            left = time_left(elapsed, step.done, step.total)
            echo(f"{step.name} stored after {duration(elapsed)}, {left}")

    with bar:
        yield tell


def model_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """MODEL, a folder that is checked before anything heavy."""

    @functools.wraps(function)
    def call(model: str, **options: Any) -> Any:
        if not (Path(model) / "config.json").is_file():
            raise UserError(
                f"{model}: no model folder (no config.json); give a folder of Hugging Face weights "
                "(`make demo-smollm2` imports one, `anchorcontext export` makes one of a run)"
            )
        return function(model=model, **options)

    return click.argument("model", metavar="MODEL")(call)
