"""A checkpoint on disk as a plain Hugging Face folder; no process group, no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..config import Config, load_config
from ..data.store import TOKENIZER
from ..model.export import ExportReport, export_model
from ..model.load import DTYPES
from .checkpoint_files import CONFIG, HF
from .consolidate import load_consolidated_state_dict

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    *,
    dtype: str | None = None,
    tokenizer: Path | None = None,
    overwrite: bool = False,
) -> ExportReport:
    """Write a complete checkpoint of any ZeRO stage as a folder that stock transformers loads.

    Args:
        checkpoint: a folder ``step-000100``.
        out: the folder to make.
        dtype: ``fp32`` or ``bf16``; default the run's ``model.dtype``.
        tokenizer: the folder of the tokenizer; default the one of the run's prepared data. Where
            that is gone, none is written.
        overwrite: replace an existing folder.

    Raises:
        UserError: the checkpoint is incomplete or damaged, or ``out`` exists.
    """
    config = load_config(checkpoint / CONFIG)
    weights = load_consolidated_state_dict(checkpoint)
    tokenizer = tokenizer or prepared_tokenizer(config)
    return export_model(
        weights,
        exported_config(checkpoint, config, tokenizer),
        out,
        dtype=DTYPES[dtype or config.model.dtype],
        tokenizer_dir=tokenizer,
        overwrite=overwrite,
    )


def exported_config(checkpoint: Path, config: Config, tokenizer: Path | None) -> PreTrainedConfig:
    """The Hugging Face config of a checkpoint, with ``tokenizer``'s special tokens where the model
    is from scratch."""
    from transformers import AutoConfig

    hf_config = AutoConfig.from_pretrained(checkpoint / HF)
    if config.model.scratch is not None and tokenizer is not None:
        _adopt_special_tokens(hf_config, tokenizer)
    return hf_config


def prepared_tokenizer(config: Config) -> Path | None:
    """The folder of the tokenizer that the run's data was made with; None when it is gone."""
    for folder in (Path(config.data.path) / TOKENIZER, config.data.tokenizer, config.model.path):
        if folder is not None and (Path(folder) / "tokenizer_config.json").is_file():
            return Path(folder)
    return None


def _adopt_special_tokens(hf_config: PreTrainedConfig, tokenizer: Path) -> None:
    """A model from scratch begins and ends texts with its tokenizer's tokens, not with Llama's."""
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(tokenizer)
    hf_config.bos_token_id = tokens.bos_token_id
    hf_config.eos_token_id = tokens.eos_token_id
