"""RULER, LongBench, HellaSwag and MMLU: their options, the run, the tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from anchorcontext.cli.common import echo_table, option_group
from anchorcontext.cli.evaluate.results import Part
from anchorcontext.words import counted

if TYPE_CHECKING:
    from anchorcontext.evaluate.target import Target

harness_options = option_group(
    "harness",
    samples=click.option(
        "--samples",
        type=click.IntRange(min=1),
        default=100,
        show_default=True,
        help="Of each task at each length.",
    ),
    all_samples=click.option(
        "--all-samples", is_flag=True, help="RULER's 500; whole data sets elsewhere."
    ),
    batch_size=click.option(
        "--batch-size", type=click.IntRange(min=1), help="Default: by the length."
    ),
    device=click.option("--device", default="auto", metavar="auto|cpu|cuda[:N]", show_default=True),
    chat=click.option(
        "--chat-template", "chat", is_flag=True, help="Ask through the chat template."
    ),
    haystack=click.option(
        "--haystack",
        type=click.Path(path_type=Path),
        help="A text (file or folder) for RULER's essays, which are a download.",
    ),
    qa=click.option(
        "--qa",
        type=click.Path(path_type=Path),
        multiple=True,
        help="A SQuAD or HotpotQA JSON file, downloads too; may be given twice.",
    ),
    download=click.option("--download", is_flag=True, help="Fetch what is missing from the hub."),
)
"""Of the harness's tasks."""


def run_harness(
    targets: Sequence[Target],
    tasks: Sequence[str],
    lengths: tuple[int, ...],
    dtype: str,
    given: Mapping[str, Any],
    output: Path,
    say: Callable[[str], None],
) -> Part:
    """Run the tasks and print their tables; ``given``: :data:`harness_options`."""
    from anchorcontext.evaluate.harness.report import (
        markdown,
        notes,
        other_rows,
        score_rows,
        summarize,
    )
    from anchorcontext.evaluate.harness.run import Options, run_units
    from anchorcontext.evaluate.harness.sources import Sources

    options = Options(
        lengths=lengths,
        samples=None if given["all_samples"] else given["samples"],
        batch_size=given["batch_size"],
        dtype=dtype,
        device=given["device"],
        chat=given["chat"],
        sources=Sources(given["haystack"], list(given["qa"]), given["download"]),
    )
    findings = run_units(targets, tasks, options, output, say)
    if findings.reused:
        say(f"{counted(findings.reused, 'result')} of earlier calls")
    report = summarize(findings)
    headers, rows = score_rows(report)
    if report.lengths:
        echo_table(rows, headers)
    if others := other_rows(report):
        echo_table(others, ["task", "metric", "score"])
    for note in notes(report):
        say(note)
    kept = summarize(findings.with_earlier(len(targets)))
    return Part(
        report,
        markdown(report) if report.results else "",
        kept if kept.results else None,
        markdown(kept),
        complete=not findings.skipped,
    )
