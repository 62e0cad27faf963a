"""Where attention rounds to the model's dtype: RoPE's tables, the rotation, the dot product.

A stock model in bf16 computes cosines and sines in fp32, rounds them to bf16, rotates in bf16 and
hands bf16 queries and keys to its attention function. Nothing has to be patched to change that:

* a rotary module that hands out fp32 tables makes layers rotate in fp32, for torch multiplies bf16
  by fp32 in fp32; queries and keys then reach the attention function in fp32;
* that function, ours, rounds them back, or keeps them and takes the values to fp32 as well, so
  that all of attention, and what travels for it, is in fp32;
* or layers do not rotate at all, and the engine does, in fp32 (:mod:`.rotation`).

Gradients pass the casts backwards and reach bf16 parameters in bf16.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .rope import rotary_modules
from .rotation import leave_rotation_to_engine, with_rotations

if TYPE_CHECKING:
    from ..config.sections import PrecisionSection


def set_precision(model: PreTrainedModel, precision: PrecisionSection) -> None:
    """Make an enabled model's attention round where ``precision`` says, in place.

    Parameters, their names and what is exported stay the same. To be called once, before the model
    is wrapped or partitioned.

    Raises:
        UserError: the engine is to rotate, and cannot do it as this model does.
    """
    rounded = precision.rope_tables == "model"
    if precision.engine_rotates:
        leave_rotation_to_engine(model, rounded)
        model.get_decoder().register_forward_pre_hook(with_rotations, with_kwargs=True)
    if precision.rotates_in_fp32:
        for name, rotary in rotary_modules(model).items():
            model.set_submodule(name, RotaryInFp32(rotary, rounded))
    if precision.rotates_in_fp32 or precision.attends_in_fp32:
        decoder = model.get_decoder()
        decoder.register_forward_pre_hook(partial(_with_precision, precision), with_kwargs=True)


class RotaryInFp32(nn.Module):
    """A rotary embedding of transformers whose cosines and sines are fp32 tensors.

    Args:
        rotary: computes them in fp32 and casts them to the dtype of its input.
        rounded: round their values to the dtype of the hidden states all the same.
    """

    def __init__(self, rotary: nn.Module, rounded: bool) -> None:
        super().__init__()
        self.rotary = rotary
        self.rounded = rounded

    def forward(
        self, x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states, of which only dtype and device count, and positions (B, S) -> cosines and
        sines, fp32 (B, S, D)."""
        cos, sin = self.rotary(x.new_empty(0, dtype=torch.float32), *args, **kwargs)
        if self.rounded:
            cos, sin = cos.to(x.dtype).float(), sin.to(x.dtype).float()
        return cos, sin

    def extra_repr(self) -> str:
        """Shown by ``repr(model)``."""
        return f"rounded={self.rounded}"


def cast_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, precision: PrecisionSection | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values as ``precision`` wants them in attention: all in fp32, or all in the
    dtype of the values, which no rotation has touched. None leaves them as they come."""
    if precision is None:
        return query, key, value
    dtype = torch.float32 if precision.attends_in_fp32 else value.dtype
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _with_precision(
    precision: PrecisionSection, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hand ``precision`` to the attention function of every layer, as the plan is handed on."""
    return args, {**kwargs, "precision": precision}
