"""Floating point operations of a training step on packed documents.

Two terms, both of *one forward and backward pass*; whatever is recomputed because of gradient
checkpointing is not counted:

* linear: ``6 * P * tokens``: a multiplication and an addition per weight forward, twice that
  backward. ``P`` counts the weights of matrix products: projections, MLPs and the language-model
  head (a tied head too: it is multiplied, although it is stored as the embedding). Embedding
  look-ups, norms and biases are not counted.
* attention: per layer and query head ``4 * D`` per visible (query, key) pair forward (q.k and p.v)
  and ``10 * D`` backward: a flash kernel runs five products there, one of them the scores again.
  Pairs that the mask hides are not counted, so a window of short documents has few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ..modes import PADDING, Mode, attention_groups

LINEAR_FLOPS_PER_WEIGHT = 6
ATTENTION_FORWARD_FLOPS = 4
ATTENTION_BACKWARD_FLOPS = 10

# Dense bf16 tensor-core FLOP/s as the vendors state them (fp32 accumulation, without sparsity).
# The first name that occurs in the device's name counts, so the longer names come first.
PEAK_BF16_FLOPS: tuple[tuple[str, float], ...] = (
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("GH200", 989e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("A10", 125e12),
    ("RTX 4090", 165e12),
    ("RTX 3090", 71e12),
    ("MI300X", 1307e12),
    ("MI250", 383e12),
)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that its FLOPs depend on."""

    linear_weights: int
    """Weights of matrix products, the language-model head included, the embedding not."""
    num_layers: int
    num_heads: int
    """Query heads."""
    head_dim: int


def model_shape(model: nn.Module) -> ModelShape:
    """The shape of a Hugging Face causal LM (on any device, ``meta`` included).

    Under ZeRO-3 the full sizes are counted, not this rank's partition.
    """
    linear = sum(
        getattr(module.weight, "ds_numel", None) or module.weight.numel()
        for module in model.modules()
        if isinstance(module, nn.Linear)
    )
    config: Any = model.config
    heads = int(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return ModelShape(int(linear), int(config.num_hidden_layers), heads, int(head_dim))


def document_pairs(lengths: Sequence[int] | np.ndarray) -> int:
    """Visible (query, key) pairs inside documents of the given lengths: ``sum n (n + 1) / 2``."""
    n = np.asarray(lengths, dtype=np.int64)
    return int((n * (n + 1) // 2).sum())


def visible_pairs(mode: Mode, doc_ids: np.ndarray) -> int:
    """Visible (query, key) pairs of a window under ``mode``, without building its mask.

    ``doc_ids`` int (L,): the document of each token (``PADDING`` for none); a document may be
    scattered over the window.
    """
    groups = attention_groups(mode, np.asarray(doc_ids))
    groups = groups[groups != PADDING]
    documents, lengths = np.unique(groups, return_counts=True)
    pairs = document_pairs(lengths)
    if mode.anchor and len(groups):
        pairs += len(groups) - int(lengths[documents == groups[0]].sum())
    return pairs


def linear_flops(shape: ModelShape, tokens: int) -> float:
    """Matrix products of weights over ``tokens`` tokens, forward and backward."""
    return float(LINEAR_FLOPS_PER_WEIGHT) * shape.linear_weights * tokens


def attention_flops(shape: ModelShape, pairs: float) -> float:
    """Attention over ``pairs`` visible (query, key) pairs in all layers, forward and backward."""
    per_pair = ATTENTION_FORWARD_FLOPS + ATTENTION_BACKWARD_FLOPS
    return float(per_pair) * pairs * shape.num_heads * shape.head_dim * shape.num_layers


def training_flops(shape: ModelShape, *, tokens: int, pairs: float) -> float:
    """All FLOPs of one forward and backward pass over ``tokens`` tokens with ``pairs`` pairs."""
    return linear_flops(shape, tokens) + attention_flops(shape, pairs)


def known_peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of one device by its name, or None when it is not known.

    The table is of 16-bit matrix products; for other dtypes the answer is None.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    for name, peak in PEAK_BF16_FLOPS:
        if name.lower() in device_name.lower():
            return peak
    return None


def peak_flops(device: torch.device, dtype: torch.dtype, configured: float | None) -> float | None:
    """The peak that MFU is measured against: the configured one, else a known GPU's, else None."""
    if configured is not None:
        return configured
    if device.type != "cuda":
        return None
    return known_peak_flops(torch.cuda.get_device_name(device), dtype)
