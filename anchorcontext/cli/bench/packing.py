"""``anchorcontext bench packing``: how fast document lengths become windows."""

from __future__ import annotations

from pathlib import Path

import click

from anchorcontext.cli.bench.options import markdown_option
from anchorcontext.cli.common import Outcome, echo, echo_table, is_main_rank, plain_command
from anchorcontext.words import counted


@plain_command
@click.option(
    "--documents",
    type=click.IntRange(min=1),
    default=3_000_000,
    metavar="N",
    show_default=True,
    help="Of 333 tokens on average.",
)
@click.option(
    "--window",
    type=click.IntRange(min=64),
    default=65536,
    metavar="L",
    show_default=True,
    help="Tokens.",
)
@click.option("--seed", default=0, metavar="N", show_default=True, help="Of the lengths.")
@markdown_option("docs/data.md")
def packing(documents: int, window: int, seed: int, markdown: Path | None) -> Outcome:
    """Pack document lengths in every way: seconds of one core, memory, filling, cut documents."""
    from anchorcontext.bench.packing import bench_packing, packing_markdown
    from anchorcontext.markdown import write_section

    results = bench_packing(documents, window, seed)
    echo_table(
        [
            (
                result.way,
                f"{result.seconds:.1f}",
                f"{result.mebibytes:,.0f}",
                result.windows,
                f"{result.utilisation:.3%}",
                f"{result.cut:.3%}",
            )
            for result in results
        ],
        ("", "seconds", "MiB", "windows", "filled", "documents cut"),
        title=f"{counted(documents, 'document')}, {results[0].tokens:,} tokens",
    )
    if markdown is not None and is_main_rank():
        options = f"--documents {documents} --window {window} --seed {seed}"
        line = f"anchorcontext bench packing {options} --markdown {markdown}"
        write_section(markdown, "packing", packing_markdown(results, window, line))
        echo(f"written to {markdown}")
    return Outcome(results)
