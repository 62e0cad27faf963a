"""Whole weights out of sharded ones: from a checkpoint on disk, or from a live engine.

Names are those of the Hugging Face model: the prefix of ``TrainModel``, which holds it, is dropped.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UserError
from ..model.train_model import PREFIX
from .checkpoint import ENGINE_TAG, Checkpoint, damage, read_checkpoint
from .launch import tell_deepspeed_the_accelerator

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

MODEL_STATE_FILE = "mp_rank_00_model_states.pt"
BF16_OPTIMIZER_FILE = "bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def load_consolidated_state_dict(checkpoint_dir: str | Path) -> dict[str, torch.Tensor]:
    """The fp32 weights of a complete checkpoint of any ZeRO stage, on the CPU.

    bf16 runs give their fp32 master weights. Tied weights appear under each of their names and
    share memory. Needs no process group and no GPU.

    Raises:
        UserError: the folder holds no complete checkpoint, or a damaged one.
    """
    checkpoint = read_checkpoint(Path(checkpoint_dir))
    reason = damage(checkpoint.path.rglob("*.pt"))
    if reason is not None:
        raise UserError(f"damaged checkpoint: {reason}; take another one, or restore a copy")
    if checkpoint.layout.zero_stage == 0:
        weights = _unsharded(checkpoint)
    elif _is_bf16_optimizer(checkpoint):
        weights = _bf16_zero1(checkpoint)
    else:
        tell_deepspeed_the_accelerator()
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            weights = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint.path), tag=ENGINE_TAG)
    weights = {strip_wrapper(name): weight for name, weight in weights.items()}
    empty = [name for name, weight in weights.items() if weight.numel() == 0]
    if empty or not weights:
        raise UserError(
            f"{checkpoint.path}: {len(empty)} of {len(weights)} weights are empty "
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


def _is_bf16_optimizer(checkpoint: Checkpoint) -> bool:
    """Whether DeepSpeed's ``BF16_Optimizer`` wrote it: bf16, ZeRO-1, fp32 accumulation, no offload.

    Its files are named like those of every bf16 run, but do not say which ZeRO stage they are of.
    """
    file = checkpoint.path / ENGINE_TAG / BF16_OPTIMIZER_FILE.format(rank=0)
    return file.is_file() and "zero_stage" not in _load(file)["optimizer_state_dict"]


def _bf16_zero1(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """bf16 under ZeRO-1, which DeepSpeed's own consolidation does not know.

    Each rank wrote its part of the flat fp32 masters of each parameter group; the parameters lie
    there one after the other, with padding at the end.
    """
    folder = checkpoint.path / ENGINE_TAG
    saved = _load(folder / MODEL_STATE_FILE)
    parts = [
        _load(folder / BF16_OPTIMIZER_FILE.format(rank=rank))
        for rank in range(checkpoint.layout.world_size)
    ]
    weights = {name: saved["module"][name].float() for name in saved["buffer_names"]}
    for group, shapes in enumerate(saved["param_shapes"]):
        flat = torch.cat(
            [
                part["optimizer_state_dict"]["single_partition_of_fp32_groups"][group].detach()
                for part in parts
            ]
        )
        offset = 0
        for name, shape in shapes.items():
            weights[name] = flat[offset : offset + shape.numel()].view(shape)
            offset += shape.numel()
    return weights | {name: weights[twin] for name, twin in saved["shared_params"].items()}


def _unsharded(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Without ZeRO rank 0 wrote the whole model, and for bf16 the masters in the optimiser."""
    saved = _load(checkpoint.path / ENGINE_TAG / MODEL_STATE_FILE)
    weights: dict[str, torch.Tensor] = dict(saved["module"])
    aliases = {name: _storage(weight) for name, weight in weights.items()}
    names = saved["anchorcontext_parameter_groups"]
    masters = saved["optimizer"].get("fp32_groups", []) if names else []
    by_storage = {
        aliases[name]: master.detach()
        for group, group_names in zip(masters, names, strict=True)
        for name, master in zip(group_names, group, strict=True)
    }
    return {
        name: by_storage[key] if (key := aliases[name]) in by_storage else weight.float()
        for name, weight in weights.items()
    }


def _load(file: Path) -> dict[str, Any]:
    return dict(torch.load(file, map_location="cpu", weights_only=False, mmap=True))


def _storage(weight: torch.Tensor) -> tuple[int, int]:
    return weight.untyped_storage().data_ptr(), int(weight.storage_offset())
