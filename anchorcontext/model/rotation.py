"""RoPE left to the engine: layers hand over unrotated queries and keys (``rotation: engine``).

Nothing is patched. The rotary module hands out cosines of 1 and sines of 0, which turn nothing; the
real ones, of the plan's rows, reach the attention function beside the plan, and the engine applies
them in fp32 right before its dot products (:mod:`anchorcontext.kernels.rotation`).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from anchorcontext.kernels import Rotation

from ..errors import UserError
from ..parallel import Plan, check_positions, plan_rotations
from .rope import head_size, rotary_modules


class EngineRotary(nn.Module):
    """A rotary embedding of transformers whose angles the engine applies.

    Args:
        rotary: computes cosines and sines in fp32.
        rounded: round their values to the dtype of the hidden states.
    """

    def __init__(self, rotary: nn.Module, rounded: bool) -> None:
        super().__init__()
        self.rotary = rotary
        self.rounded = rounded
        self.stands_aside = True
        """False while :func:`~.rotation_check.check_rotation` lets the layers rotate."""

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states, of which only dtype and device count, and positions (B, S) -> cosines and
        sines (B, S, D) that turn nothing."""
        if not self.stands_aside:
            return self.rotary(x, position_ids, *args, **kwargs)
        shape = (*position_ids.shape, 2 * len(cast(torch.Tensor, self.rotary.inv_freq)))
        return x.new_ones(1).expand(shape), x.new_zeros(1).expand(shape)

    def rotations(self, plan: Plan, x: torch.Tensor) -> tuple[Rotation, ...]:
        """The rotations of ``plan``'s steps; of hidden states ``x`` dtype and device count."""

        def tables(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            empty = x.new_empty(0, dtype=torch.float32)
            # Both halves of a head turn by the same angles.
            cos, sin = (
                table[0, :, : table.shape[-1] // 2].contiguous()
                for table in self.rotary(empty, positions[None])
            )
            if self.rounded:
                cos, sin = cos.to(x.dtype).float(), sin.to(x.dtype).float()
            return cos, sin

        return plan_rotations(plan, tables, x.device)

    def extra_repr(self) -> str:
        """Shown by ``repr(model)``."""
        return f"rounded={self.rounded}, applied by the engine"


def leave_rotation_to_engine(model: PreTrainedModel, rounded: bool) -> None:
    """Let the engine rotate queries and keys of an enabled model, in place.

    Raises:
        UserError: the model has several rotary modules, or rotates a part of each head.
    """
    name, kind = type(model).__name__, "attention.precision.rotation = 'engine'"
    modules = rotary_modules(model)
    if len(modules) != 1:
        raise UserError(
            f"{name} has {len(modules)} rotary modules ({', '.join(modules) or 'none'}): {kind} "
            "needs one for all layers; set it to fp32"
        )
    ((place, rotary),) = modules.items()
    head_dim = head_size(model.config.get_text_config())
    if 2 * len(rotary.inv_freq) != head_dim:
        raise UserError(
            f"{name} rotates {2 * len(rotary.inv_freq)} of {head_dim} columns of a head: {kind} "
            "needs all of them; set it to fp32"
        )
    model.set_submodule(place, EngineRotary(rotary, rounded))


def with_rotations(
    decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before a decoder runs: hand the rotations of its plan to every layer's attention function.

    Raises:
        UserError: the positions are not those of the plan's windows, or not given.
    """
    rotary = engine_rotary(decoder)
    plan, positions = kwargs["plan"], kwargs.get("position_ids")
    if positions is None:
        raise UserError(
            "the model was called without position_ids=: with attention.precision.rotation = "
            "'engine' give those of shard(windows, plan)"
        )
    check_positions(positions, plan)
    like = torch.empty(0, dtype=decoder.dtype, device=positions.device)
    return args, {**kwargs, "rotations": rotary.rotations(plan, like)}


def engine_rotary(model: nn.Module) -> EngineRotary:
    """The rotary module of a model prepared by :func:`leave_rotation_to_engine`."""
    (found,) = (module for module in model.modules() if isinstance(module, EngineRotary))
    return found
