"""Tiny models and the stock oracle: transformers itself, with the mask written out."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..parity.oracle import expected_mask, expected_positions
from ..window import Window

TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
OF_TYPE: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"head_dim": 16, "use_sliding_window": False},
    "mistral": {"sliding_window": None},
}


def tiny_config(model_type: str = "llama", **changes: Any) -> PreTrainedConfig:
    """The config of a tiny model: vocabulary 128, hidden 64, 2 layers, 4 query and 2 key heads."""
    # A copy: transformers keeps the dictionaries it is given, and tests edit them.
    keys = copy.deepcopy({**TINY, **OF_TYPE[model_type], **changes})
    return AutoConfig.for_model(model_type, **keys)


def tiny_model(
    model_type: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> PreTrainedModel:
    """A tiny model with seeded weights, in training mode, with stock attention.

    ``changes`` go into its config: ``num_key_value_heads``, ``tie_word_embeddings``, ...
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(model_type, **changes))
        # Biases start at zero, which would hide a bias that is dropped.
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.1)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.train()


def tiny_llama(**options: Any) -> PreTrainedModel:
    """The tiny LLaMA of the tests: 21 tensors, fp32, untied, seed 0."""
    return tiny_model("llama", **options)


def tiny_qwen2(**options: Any) -> PreTrainedModel:
    """A tiny Qwen2: biases on q, k and v."""
    return tiny_model("qwen2", **options)


def tiny_qwen3(**options: Any) -> PreTrainedModel:
    """A tiny Qwen3: q and k are normalised per head."""
    return tiny_model("qwen3", **options)


def tiny_mistral(**options: Any) -> PreTrainedModel:
    """A tiny Mistral without sliding window."""
    return tiny_model("mistral", **options)


def stock_logits(model: PreTrainedModel, window: Window) -> torch.Tensor:
    """Logits (1, L, V) of stock transformers on the whole window, with an explicit 4-D mask.

    ``model``: with stock attention (``"eager"`` is selected here). Mask and positions come from the
    table of modes written out in :mod:`anchorcontext.parity.oracle`, not from ``modes.py``.
    Differentiable; quadratic in L.
    """
    model.set_attn_implementation("eager")
    device, dtype = model.device, model.dtype
    seen = torch.from_numpy(expected_mask(window)).to(device)
    bias = torch.zeros(seen.shape, dtype=dtype, device=device)
    bias = bias.masked_fill(~seen, torch.finfo(dtype).min)[None, None]
    output = model(
        input_ids=torch.tensor(window.input_ids, device=device)[None],
        position_ids=torch.from_numpy(expected_positions(window)).to(device)[None],
        attention_mask=bias,
        use_cache=False,
    )
    return output.logits


def stock_loss(model: PreTrainedModel, window: Window) -> torch.Tensor:
    """Summed cross-entropy of :func:`stock_logits` over the window's targets, ()."""
    logits = stock_logits(model, window)[0].float()
    labels = torch.tensor(window.labels, device=logits.device)
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
