"""``anchorcontext report``: a run in one table, or on one page."""

from __future__ import annotations

from pathlib import Path

import click

from anchorcontext.cli.common import Outcome, echo, echo_table, plain_command
from anchorcontext.errors import writing


@plain_command
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--html",
    "html",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="PATH",
    help="Write curves, events and the config to PATH: one page that needs nothing else.",
)
def command(run: Path, html: Path | None) -> Outcome:
    """Sum up a run: loss, speed, memory, traffic, parity, and where everything lies.

    RUN is the run's folder, output_dir/name of its config; the run may be going on.
    """
    from anchorcontext.watch.summary import summarize, summary_rows

    found = summarize(run)
    folders = [("metrics", run / "metrics.jsonl"), ("config", run / "config.yaml")]
    folders += [("checkpoint", path) for path in found.checkpoints]
    folders += [("trace", path) for path in sorted((run / "profile").glob("*.json.gz"))]
    folders += [("Hugging Face folder", path) for path in sorted(run.glob("hf*")) if path.is_dir()]
    rows = [*summary_rows(found), *((name, str(path)) for name, path in folders)]
    echo_table(rows, title=f"Run {run}")
    if html is not None:
        from anchorcontext.watch.run_report import write_run_report

        with writing("--html", html):
            write_run_report(run, html)
        echo(f"written: {html}")
    return Outcome(found)
