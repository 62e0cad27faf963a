"""``anchorcontext diagnose report``: one HTML page of all that was measured."""

from __future__ import annotations

from pathlib import Path

import click

from anchorcontext.cli.common import echo, plain_command
from anchorcontext.cli.diagnose.common import DEFAULT_OUT


@plain_command
@click.argument(
    "out", metavar="[DIR]", default=DEFAULT_OUT, type=click.Path(path_type=Path, file_okay=False)
)
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="PATH",
    help="Where the page goes; default DIR/report.html.",
)
def command(out: Path, html: Path | None) -> dict[str, object]:
    """Put the diagnoses of DIR on one HTML page: settings, figures, readings from the numbers.

    DIR is the folder they were given as --out (runs/precision). The page needs nothing else: its
    figures are inline, nothing is loaded.
    """
    from anchorcontext.precision.report import write_report

    path = html or out / "report.html"
    names = write_report(out, path)
    echo(f"{', '.join(names)}: written to {path}")
    return {"html": path, "diagnoses": names}
