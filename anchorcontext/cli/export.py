"""``anchorcontext export``: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import click

from anchorcontext.cli.common import Outcome, echo, plain_command
from anchorcontext.words import counted


@plain_command
@click.argument("source", metavar="CHECKPOINT_OR_RUN", type=click.Path(path_type=Path))
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16"]),
    help="Type of the written weights; default: the run's model.dtype.",
)
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder of the tokenizer; default: the one of the run's prepared data.",
)
@click.option("--overwrite", is_flag=True, help="Replace OUT when it exists.")
def command(
    source: Path, out: Path, dtype: str | None, tokenizer: Path | None, overwrite: bool
) -> Outcome:
    """Turn a checkpoint into a plain Hugging Face folder that stock transformers loads.

    CHECKPOINT_OR_RUN is one checkpoint (a folder step-000100), or a run, of which the latest
    complete checkpoint is taken. Every ZeRO stage works; neither ranks nor a GPU are needed.
    """
    from anchorcontext.train.checkpoint_files import find_checkpoint

    checkpoint = find_checkpoint(source)  # a wrong folder is refused before torch is imported

    from anchorcontext.train.export import export_checkpoint

    report = export_checkpoint(
        checkpoint, out, dtype=dtype, tokenizer=tokenizer, overwrite=overwrite
    )
    echo(
        f"{report.path}: {checkpoint.name}, {counted(report.num_tensors, 'tensor')}, "
        f"{report.num_parameters / 1e6:.1f}M parameters, {report.dtype}, "
        f"{report.num_bytes / 1e6:.0f} MB"
    )
    if not report.tokenizer:
        echo("without a tokenizer: the prepared data is gone and --tokenizer was not given")
    return Outcome(report)
