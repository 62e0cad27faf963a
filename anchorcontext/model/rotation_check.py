"""Whether a model's layers rotate queries and keys as an engine does that rotates for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from anchorcontext.kernels import rotate

from ..errors import UserError
from ..parallel import make_plan, shard
from ..window import Window
from .attention import NAME, attention_forward
from .rotation import engine_rotary

TOLERANCE = 0.03
"""Largest relative difference between what a layer rotates in bf16 and what an engine would."""

Heads = tuple[nn.Module, torch.Tensor, torch.Tensor]


@torch.no_grad()
def check_rotation(model: PreTrainedModel) -> None:
    """See that every layer rotates as the engine will, on a window of 7 tokens.

    ``model``: as :func:`~.rotation.leave_rotation_to_engine` left it, its weights on a device.

    Raises:
        UserError: a layer does not rotate, or pairs other columns; names it.
    """
    rotary = engine_rotary(model)
    window = Window([1] * 7, [0, 7], "full")
    plan = make_plan(window)
    local = shard(window, plan, model.device)
    inputs = {"input_ids": local.input_ids, "position_ids": local.position_ids, "plan": plan}
    names = {module: name for name, module in model.named_modules()}
    rotary.stands_aside = False
    try:
        with _heads_of_layers() as rotated:
            model(**inputs)
    finally:
        rotary.stands_aside = True
    with _heads_of_layers() as unrotated:
        model(**inputs)
    (rotation,) = rotary.rotations(plan, torch.empty(0, dtype=model.dtype, device=model.device))
    for (layer, *expected), (_, *heads) in zip(rotated, unrotated, strict=True):
        for x, y in zip(heads, expected, strict=True):
            turned = rotate(x[0].transpose(0, 1), rotation.q_cos, rotation.q_sin).transpose(0, 1)
            if not (turned - y[0].float()).norm() <= TOLERANCE * turned.norm():
                raise UserError(
                    f"{names[layer]} of {type(model).__name__} does not rotate as an engine does "
                    "(column d with column d + D / 2 of every head): "
                    "attention.precision.rotation = 'engine' would change it; set it to fp32"
                )


@contextmanager
def _heads_of_layers() -> Iterator[list[Heads]]:
    """Attention answers zeros and lists the layers' modules, queries and keys (1, H, S, D)."""
    seen: list[Heads] = []

    def listen(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, None]:
        seen.append((module, query, key))
        return torch.zeros_like(query, dtype=value.dtype).transpose(1, 2), None

    AttentionInterface.register(NAME, listen)
    try:
        yield seen
    finally:
        AttentionInterface.register(NAME, attention_forward)
