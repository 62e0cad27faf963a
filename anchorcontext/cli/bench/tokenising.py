"""``anchorcontext bench data``: how fast texts become token ids on disk."""

from __future__ import annotations

from pathlib import Path

import click

from anchorcontext.cli.bench.options import markdown_option
from anchorcontext.cli.common import Outcome, echo, echo_table, is_main_rank, plain_command
from anchorcontext.words import counted


@plain_command
@click.option(
    "--megabytes",
    type=click.IntRange(min=1),
    default=100,
    metavar="N",
    show_default=True,
    help="Of JSON lines.",
)
@click.option(
    "--workers", type=click.IntRange(min=1), metavar="N", help="Processes. Default: one a core."
)
@click.option("--repeats", type=click.IntRange(min=1), default=2, metavar="N", show_default=True)
@click.option("--tokenizer", metavar="FOLDER", help="Default: a BPE of 8,192 entries is trained.")
@markdown_option("docs/benchmarks.md")
def data(
    megabytes: int, workers: int | None, repeats: int, tokenizer: str | None, markdown: Path | None
) -> Outcome:
    """Tokenise the same texts with prepare and with a plain script over datasets.map."""
    from anchorcontext.bench.data import HEADERS, bench_data, data_markdown, table_rows
    from anchorcontext.data import load_tokenizer
    from anchorcontext.data.tokenise import usable_cores
    from anchorcontext.environment import cores, measured_on
    from anchorcontext.markdown import write_section

    count = workers or usable_cores()
    loaded = None if tokenizer is None else load_tokenizer(tokenizer)
    results = bench_data(megabytes, count, repeats, loaded)
    name = (
        "a byte-level BPE of 8,192 entries" if tokenizer is None else f"the tokenizer {tokenizer}"
    )
    setting = (
        f"{megabytes} MB of JSON lines (this Python's standard library, repeated) to token ids on "
        f"disk with {name}: {results[0].tokens:,} tokens. The tokenizer's own threads are off. "
        f"{counted(repeats, 'repeat')} in turn, the fastest counts; {cores()}, "
        f"{measured_on()}."
    )
    echo_table(table_rows(results), HEADERS, title=setting)
    if markdown is not None and is_main_rank():
        line = f"anchorcontext bench data --megabytes {megabytes} --workers {count} "
        line += f"--repeats {repeats} --markdown {markdown}"
        write_section(markdown, "data", data_markdown(results, setting, line))
        echo(f"written to {markdown}")
    return Outcome(results)
