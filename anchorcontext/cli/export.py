"""``anchorcontext export``: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from anchorcontext.cli.common import Outcome, echo, plain_command
from anchorcontext.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from anchorcontext.config import Config


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
    from transformers import AutoConfig

    from anchorcontext.config import load_config
    from anchorcontext.model.export import export_model
    from anchorcontext.model.load import DTYPES
    from anchorcontext.train.checkpoint_files import HF
    from anchorcontext.train.consolidate import load_consolidated_state_dict

    checkpoint = find_checkpoint(source)
    config = load_config(checkpoint / "config.yaml")
    weights = load_consolidated_state_dict(checkpoint)
    hf_config = AutoConfig.from_pretrained(checkpoint / HF)
    tokenizer = tokenizer or _prepared_tokenizer(config)
    if config.model.scratch is not None and tokenizer is not None:
        _adopt_special_tokens(hf_config, tokenizer)
    report = export_model(
        weights,
        hf_config,
        out,
        dtype=DTYPES[dtype or config.model.dtype],
        tokenizer_dir=tokenizer,
        overwrite=overwrite,
    )
    echo(
        f"{report.path}: {checkpoint.name}, {report.num_tensors} tensors, "
        f"{report.num_parameters / 1e6:.1f}M parameters, {report.dtype}, "
        f"{report.num_bytes / 1e6:.0f} MB"
    )
    if tokenizer is None:
        echo("without a tokenizer: the prepared data is gone and --tokenizer was not given")
    return Outcome(report)


def find_checkpoint(source: Path) -> Path:
    """The checkpoint folder meant by a checkpoint, a run or its ``checkpoints`` folder.

    Raises:
        UserError: there is no complete checkpoint.
    """
    from anchorcontext.train.checkpoint_files import MANIFEST, find_checkpoints

    if (source / MANIFEST).is_file():
        return source
    folder = source / "checkpoints" if (source / "checkpoints").is_dir() else source
    complete, torn = find_checkpoints(folder)
    if not complete:
        reason = f" ({'; '.join(torn)})" if torn else ""
        raise UserError(
            f"{source} holds no complete checkpoint{reason}: give a run's folder or one of its "
            "checkpoints, and train with checkpoint.final or checkpoint.every"
        )
    return complete[-1].path


def _adopt_special_tokens(hf_config: PreTrainedConfig, tokenizer: Path) -> None:
    """A model from scratch begins and ends texts with its tokenizer's tokens, not with Llama's."""
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(tokenizer)
    hf_config.bos_token_id = tokens.bos_token_id
    hf_config.eos_token_id = tokens.eos_token_id


def _prepared_tokenizer(config: Config) -> Path | None:
    from anchorcontext.data.store import TOKENIZER

    for folder in (Path(config.data.path) / TOKENIZER, config.data.tokenizer, config.model.path):
        if folder is not None and (Path(folder) / "tokenizer_config.json").is_file():
            return Path(folder)
    return None
