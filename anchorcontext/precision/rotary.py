"""RoPE tables and norms in the precision one asks for, given to a stock model from outside.

Stock models compute angles in fp32 and round cos and sin to the model's dtype; their RMS norms
compute in fp32 whatever the dtype. A floor in fp64 needs both in fp64. Neither is patched: the
layers take any cos and sin, and a forward hook may return another output of a module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedConfig

from ..model.rope import expected_inv_freq


class Rotary(Protocol):
    """What a decoder's ``rotary_emb`` does: cos and sin, each (B, T, rotated dimensions)."""

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class ExactRotary:
    """Tables computed in fp64 from the config's formulas and rounded once, at the end."""

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype | None = None) -> None:
        """``dtype`` of the tables; default that of the hidden states.

        Raises:
            UserError: a RoPE type whose formula is not known (dynamic ones have no fixed table).
        """
        inv_freq, self._factor = expected_inv_freq(config)
        self._inv_freq = torch.from_numpy(inv_freq)
        self._dtype = dtype

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of ``position_ids`` (B, T), int64; of ``x`` only device and dtype matter."""
        angles = position_ids[..., None].double() * self._inv_freq.to(x.device)
        angles = torch.cat((angles, angles), dim=-1)
        dtype = self._dtype or x.dtype
        return (angles.cos() * self._factor).to(dtype), (angles.sin() * self._factor).to(dtype)


@contextmanager
def exact_norms(model: nn.Module) -> Iterator[int]:
    """Within it, every RMS norm of ``model`` computes in the dtype of its input, fp64 included.

    Gives the number of norms found. Stock norms round their input to fp32 first, a step that makes
    a difference of 1e-16 into one of 6e-8 now and then.
    """
    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
    handles = [norm.register_forward_hook(_exact_norm) for norm in norms]
    try:
        yield len(norms)
    finally:
        for handle in handles:
            handle.remove()


def _exact_norm(norm: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    x = inputs[0]
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * (x * scale)
