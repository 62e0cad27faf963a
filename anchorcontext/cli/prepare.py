"""``anchorcontext prepare``: corpus to tokenised, packed windows on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from anchorcontext.cli.common import Outcome, config_command, echo, echo_table, is_main_rank
from anchorcontext.config import Config

if TYPE_CHECKING:
    from anchorcontext.data import PrepareReport

BAR_CHARACTERS = 40


@config_command
@click.option("--force", is_flag=True, help="Replace windows that were made differently.")
@click.option(
    "--png", type=click.Path(path_type=Path), metavar="PATH", help="Draw lengths and a window."
)
def command(config: Config, force: bool, png: Path | None) -> Outcome:
    """Turn a corpus into tokenised, packed windows on disk.

    A folder that already holds exactly what CONFIG asks for is reused; one that was made with
    other sources, tokenizer or options is replaced only with --force. A run that was ended goes
    on where it was.
    """
    from anchorcontext.data import WindowDataset, configured_view, prepare

    with _progress_bar() as progress:
        report = prepare(config, force=force, progress=progress)
    _print(report)
    if png is not None and is_main_rank():
        from anchorcontext.watch.draw_corpus import draw_corpus

        dataset = WindowDataset(report.path)
        window = configured_view(config, dataset).window(dataset[report.windows // 2])
        draw_corpus(report, window, png)
        echo(f"drawn to {png}")
    return Outcome(report)


@contextmanager
def _progress_bar() -> Iterator[Callable[[str, int, int | None], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("{task.description:<18}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not is_main_rank(),
    )
    stages: dict[str, TaskID] = {}

    def update(stage: str, done: int, total: int | None) -> None:
        if stage not in stages:
            stages[stage] = bar.add_task(stage, total=total)
        bar.update(stages[stage], completed=done, total=total)

    with bar:
        yield update


def _print(report: PrepareReport) -> None:
    if report.reused:
        echo(f"{report.path} already holds these windows; nothing to do (--force prepares again)")
    rows: list[tuple[str, int]] = [
        ("documents", report.documents),
        ("tokens in", report.tokens_in),
        ("tokens kept", report.tokens_kept),
        *((f"tokens dropped: {name}", drop.tokens) for name, drop in report.dropped.items()),
        *((f"entries skipped: {name}", count) for name, count in report.problems.items()),
        ("documents cut at a window edge", report.documents_cut),
        (f"windows of {report.window_tokens:,} tokens", report.windows),
        ("vocabulary", report.vocab_size),
    ]
    if report.validation is not None:
        held_out = report.validation
        rows += [
            ("documents held out for validation", held_out.documents),
            ("their tokens kept", held_out.tokens),
            ("their windows", held_out.windows),
        ]
    echo_table(rows, title=report.path)
    shares = [
        (
            name,
            part.documents,
            part.tokens,
            part.kept,
            part.tokens - part.kept,
            100 * part.kept / max(report.tokens_kept, 1),
        )
        for name, part in report.sources.items()
    ]
    echo_table(shares, ("source", "documents", "tokens", "kept", "dropped", "% of kept"))
    lengths = report.document_tokens
    echo_table([list(lengths.values())], list(lengths), title="tokens a document")
    _print_histogram(report)
    for example in report.problem_examples:
        echo(f"skipped {example}")
    seconds = ", ".join(f"{stage} {value:.1f} s" for stage, value in report.seconds.items())
    echo(f"{100 * report.utilisation:.1f}% of the windows is real tokens; {seconds}")


def _print_histogram(report: PrepareReport) -> None:
    """Documents by length, in powers of two; the bar shows their share of the tokens."""
    total = max(sum(entry.tokens for entry in report.length_histogram), 1)
    echo_table(
        [
            (
                entry.at_least,
                entry.documents,
                entry.tokens,
                "#" * round(BAR_CHARACTERS * entry.tokens / total),
            )
            for entry in report.length_histogram
        ],
        ("tokens, at least", "documents", "tokens", "share of all tokens"),
    )
