"""The configured model's sizes: its Hugging Face config is read, no weight is made or loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import UserError
from ..watch.flops import ModelShape, model_shape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ..config import Config


@dataclass(frozen=True)
class ModelSizes:
    """What memory, work and traffic depend on."""

    model_type: str
    parameters: int
    """A tied head counts once."""
    layer_parameters: int
    """Of one decoder layer."""
    linear_weights: int
    """Weights of matrix products; a tied head counts here."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    normalizes_heads: bool
    """Queries and keys are normalised per head (Qwen3)."""

    @property
    def head_weights(self) -> int:
        """Weights of the language-model head."""
        return self.vocab_size * self.hidden_size

    @property
    def flops_shape(self) -> ModelShape:
        """As :mod:`anchorcontext.watch.flops` takes it."""
        return ModelShape(self.linear_weights, self.num_layers, self.num_heads, self.head_dim)


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
    window_tokens = config.data.window_tokens
    return model_sizes(
        build_config(config.model, window_tokens=window_tokens, vocab_size=vocab_size)
    )


def _vocabulary(config: Config) -> int | None:
    """Entries of the tokenizer that a model from scratch will get; None where nobody knows yet."""
    from ..data.store import read_meta

    if config.data.train_tokenizer is not None:
        return config.data.train_tokenizer.vocab_size
    meta = read_meta(Path(config.data.path).expanduser())
    return None if meta is None else int(meta["vocab_size"])


def model_sizes(hf_config: PreTrainedConfig) -> ModelSizes:
    """The sizes of the model that a Hugging Face config describes, counted on the meta device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    text = hf_config.get_text_config()
    shape = model_shape(model)
    layers = model.get_decoder().layers
    return ModelSizes(
        model_type=str(hf_config.model_type),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layer_parameters=sum(parameter.numel() for parameter in layers[0].parameters()),
        linear_weights=shape.linear_weights,
        num_layers=shape.num_layers,
        hidden_size=int(text.hidden_size),
        intermediate_size=int(text.intermediate_size),
        num_heads=shape.num_heads,
        num_kv_heads=int(getattr(text, "num_key_value_heads", None) or shape.num_heads),
        head_dim=shape.head_dim,
        vocab_size=int(text.vocab_size),
        normalizes_heads=any(name.endswith("q_norm") for name, _ in layers[0].named_modules()),
    )
