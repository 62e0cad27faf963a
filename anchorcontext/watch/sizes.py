"""The sizes of a model that memory, work and traffic depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .flops import ModelShape, model_shape

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig


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
    def mlp_share(self) -> float:
        """Of a layer's weights of matrix products, those of a gated MLP."""
        layer = (self.linear_weights - self.head_weights) / self.num_layers
        return 3 * self.hidden_size * self.intermediate_size / layer

    @property
    def flops_shape(self) -> ModelShape:
        """As :mod:`anchorcontext.watch.flops` takes it."""
        return ModelShape(self.linear_weights, self.num_layers, self.num_heads, self.head_dim)


def model_sizes(hf_config: PreTrainedConfig) -> ModelSizes:
    """The sizes of the model that a Hugging Face config describes, counted on the meta device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sizes_of(AutoModelForCausalLM.from_config(hf_config))


def sizes_of(model: nn.Module) -> ModelSizes:
    """The sizes of a causal LM of transformers, on any device; under ZeRO-3 of the whole one."""
    causal_lm: Any = model
    text = causal_lm.config.get_text_config()
    shape = model_shape(model)
    layers = causal_lm.get_decoder().layers
    return ModelSizes(
        model_type=str(causal_lm.config.model_type),
        parameters=_parameters(model),
        layer_parameters=_parameters(layers[0]),
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


def _parameters(module: nn.Module) -> int:
    # Of a partitioned parameter DeepSpeed knows the size.
    return sum(getattr(p, "ds_numel", None) or p.numel() for p in module.parameters())
