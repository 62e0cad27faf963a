"""Whole weights out of sharded ones: from a checkpoint on disk, or from a live engine.

Names are those of the Hugging Face model: the prefix of ``TrainModel``, which holds it, is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import UserError
from ..model.train_model import PREFIX
from .checkpoint_files import damage, read_checkpoint
from .shards import SavedEngine

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def consolidated_weights(checkpoint_dir: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """As :func:`load_consolidated_state_dict`, one weight at a time; of tied ones the first.

    Raises:
        UserError: the folder holds no complete checkpoint, or a damaged one.
    """
    saved = _saved_engine(checkpoint_dir)
    for name, buffer in saved.buffers().items():
        yield strip_wrapper(name), buffer.float()
    for state in saved.parameters():
        yield strip_wrapper(state.name), state.master


def _saved_engine(checkpoint_dir: str | Path) -> SavedEngine:
    checkpoint = read_checkpoint(Path(checkpoint_dir))
    reason = damage(checkpoint.path.rglob("*.pt"))
    if reason is not None:
        raise UserError(f"damaged checkpoint: {reason}; take another one, or restore a copy")
    return SavedEngine(checkpoint)


def load_consolidated_state_dict(checkpoint_dir: str | Path) -> dict[str, torch.Tensor]:
    """The fp32 weights of a complete checkpoint of any ZeRO stage, on the CPU.

    bf16 runs give their fp32 master weights. Tied weights appear under each of their names and
    share memory. Needs no process group and no GPU.

    Raises:
        UserError: the folder holds no complete checkpoint, or a damaged one.
    """
    saved = _saved_engine(checkpoint_dir)
    weights = {name: buffer.float() for name, buffer in saved.buffers().items()}
    weights |= {state.name: state.master for state in saved.parameters()}
    weights |= {name: weights[twin] for name, twin in saved.tied.items()}
    weights = {strip_wrapper(name): weight for name, weight in weights.items()}
    empty = [name for name, weight in weights.items() if weight.numel() == 0]
    if empty or not weights:
        raise UserError(
            f"{checkpoint_dir}: {len(empty)} of {len(weights)} weights are empty "
            f"({', '.join(empty[:3])}): the checkpoint cannot be consolidated; take another one"
        )
    return weights


def gather_state_dict(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """The live weights in the model's dtype, whole, on rank 0's CPU; empty on other ranks.

    Collective. Under ZeRO-3 one parameter at a time is gathered.
    """
    import deepspeed
    import torch.distributed as dist

    keep = dist.get_rank() == 0
    weights = {}
    named = dict(engine.module.named_parameters(remove_duplicate=False))
    copies: dict[int, torch.Tensor] = {}
    for name, parameter in named.items():
        if id(parameter) not in copies:
            sharded = [parameter] if hasattr(parameter, "ds_id") else []
            with deepspeed.zero.GatheredParameters(sharded, enabled=bool(sharded)):
                copy = parameter.detach().to("cpu", copy=True) if keep else torch.empty(0)
            copies[id(parameter)] = copy
        weights[strip_wrapper(name)] = copies[id(parameter)]
    persistent = engine.module.state_dict(keep_vars=True).keys() - named.keys()
    buffers = dict(engine.module.named_buffers())
    weights |= {strip_wrapper(name): buffers[name].detach().cpu() for name in persistent}
    return weights if keep else {}


def strip_wrapper(name: str) -> str:
    """The Hugging Face name of one of ``TrainModel``'s parameters."""
    return name.removeprefix(PREFIX)
