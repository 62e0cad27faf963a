"""``anchorcontext bench NAME``: benchmarks, each against named baselines in the same run."""

from __future__ import annotations

from pathlib import Path

import click

from anchorcontext.cli.common import Outcome, echo, echo_table, is_main_rank, plain_command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Benchmarks, each against named baselines in the same run.

    Each takes --json PATH, and --markdown PATH for its section of docs/benchmarks.md.
    """


@plain_command
@click.option(
    "--seed", default=0, metavar="N", show_default=True, help="Which windows of the mixes."
)
@click.option(
    "--markdown",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="PATH",
    help="Write the tables into their section of PATH, docs/benchmarks.md.",
)
def layouts(seed: int, markdown: Path | None) -> Outcome:
    """Compare layouts on named length mixes: modelled step time, balance and travel."""
    from anchorcontext.bench.layouts import LAYOUTS, bench_layouts, layouts_markdown
    from anchorcontext.bench.markdown import write_section

    results = bench_layouts(seed)
    for link in dict.fromkeys(result.link for result in results):
        cells = {
            (result.mix, result.sp_size, result.layout): result
            for result in results
            if result.link == link
        }
        keys = dict.fromkeys(key[:2] for key in cells)
        echo_table(
            [
                (
                    mix,
                    sp_size,
                    *(f"{cells[mix, sp_size, name].over_bound:.3f}" for name in LAYOUTS),
                    f"{cells[mix, sp_size, 'balanced'].layout_ms:.1f}",
                )
                for mix, sp_size in keys
            ],
            ("window", "ranks", *LAYOUTS, "balanced, ms"),
            title=f"{link}: modelled step time over its lower bound",
        )
    if markdown is not None and is_main_rank():
        write_section(markdown, "layouts", layouts_markdown(results))
        echo(f"written to {markdown}")
    return Outcome(results)


command.add_command(layouts, "layouts")
