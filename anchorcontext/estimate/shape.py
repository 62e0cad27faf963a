"""The configured model's sizes: its Hugging Face config is read, no weight is made or loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError
from ..watch.sizes import ModelSizes, model_sizes

if TYPE_CHECKING:
    from ..config import Config


def configured_sizes(config: Config, vocab_size: int | None = None) -> ModelSizes:
    """The sizes of the config's model.

    Args:
        vocab_size: entries of the tokenizer, where it is known before the data is prepared.

    Raises:
        UserError: a hub name whose config is not on this machine; whatever ``train`` would refuse
            in the model's config.
    """
    from ..model.load import build_config

    path = config.model.path
    if path is not None and not Path(path).exists():
        raise UserError(
            f"model.path = {path}: no folder of this machine, and plan downloads nothing; give a "
            "folder that holds the model's config.json (no weights are needed), as in "
            "model.path=FOLDER, or describe the model with model.scratch"
        )
    if vocab_size is None and config.model.scratch is not None:
        vocab_size = _vocabulary(config)
    return model_sizes(
        build_config(config.model, window_tokens=config.longest_position, vocab_size=vocab_size)
    )


def _vocabulary(config: Config) -> int | None:
    """Entries of the tokenizer that a model from scratch will get; None where nobody knows yet."""
    from ..data.store import known_meta

    if config.data.train_tokenizer is not None:
        return config.data.train_tokenizer.vocab_size
    meta = known_meta(Path(config.data.path).expanduser())
    return None if meta is None else int(meta["vocab_size"])
