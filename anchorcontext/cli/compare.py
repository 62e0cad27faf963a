"""``anchorcontext compare``: arms of an ablation in one table and one plot set."""

from __future__ import annotations

from pathlib import Path

import click

from anchorcontext.cli.common import Outcome, echo, echo_table, plain_command
from anchorcontext.errors import writing


@plain_command
@click.argument(
    "runs",
    metavar="RUN...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
)
@click.option(
    "--results",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A result file of `evaluate`, besides RUN/evaluation/results.json; may be repeated.",
)
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="PATH",
    help="Write tables and figures to PATH: one page that needs nothing else.",
)
@click.option(
    "--markdown",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="PATH",
    help="Write the tables to PATH.",
)
def command(
    runs: tuple[Path, ...], results: tuple[Path, ...], html: Path | None, markdown: Path | None
) -> Outcome:
    """Compare runs: the config keys that differ, cost, losses and scores, side by side.

    RUN is a run's folder; it may be going on. Scores come from `anchorcontext evaluate RUN --output
    RUN/evaluation`, and from --results.
    """
    from anchorcontext.evaluate.compare import compare_runs, comparison_markdown

    found = compare_runs(runs, results)
    names = [arm.name for arm in found.arms]
    different = found.difference_cells()
    if different:
        echo_table(different, ("config key", *names))
    else:
        echo("the configs are equal")
    echo_table(found.cells(), ("", *names))
    for warning in found.warnings:
        echo(f"note: {warning}")
    if markdown is not None:
        with writing("--markdown", markdown):
            markdown.parent.mkdir(parents=True, exist_ok=True)
            markdown.write_text(comparison_markdown(found))
        echo(f"written: {markdown}")
    if html is not None:
        from anchorcontext.evaluate.compare_page import comparison_page
        from anchorcontext.watch.page import write_page

        with writing("--html", html):
            write_page(comparison_page(found), html)
        echo(f"written: {html}")
    figures = {name: dict(zip(names, values, strict=True)) for name, values, _ in found.rows}
    keys = {key: dict(zip(names, values, strict=True)) for key, values in found.differences.items()}
    report = {"runs": names, "different_keys": keys, "figures": figures}
    return Outcome(report | {"warnings": found.warnings})
