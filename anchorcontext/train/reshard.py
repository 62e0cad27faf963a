"""A checkpoint into an engine of another number of ranks, another sp or another ZeRO stage.

Every rank reads every parameter whole from the files of all ranks (:mod:`.shards`) and keeps what
its own engine holds of it. Why not the libraries' ways: DeepSpeed's universal checkpoints need a
conversion of the files before the run, double the disk, and do not know ZeRO-0; torch's distributed
checkpoints want DTensors, which DeepSpeed's flat groups are not. So files stay DeepSpeed's own, and
a changed layout costs time only when it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..errors import UserError
from .checkpoint_files import WorldLayout
from .shards import STEP, ParameterState, SavedEngine

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

Place = tuple[torch.Tensor, int, int, int]
"""A tensor of the optimiser, where in it, from which element of the parameter, how many."""


def check_movable(saved: WorldLayout, wanted: WorldLayout) -> None:
    """Refuse a change of layout that cannot be made.

    Raises:
        UserError: the optimiser's state is, or would be, on NVMe; its files are no checkpoint's.
    """
    if saved != wanted and "nvme" in (saved.optimizer_device, wanted.optimizer_device):
        changes = ", ".join(saved.changes_to(wanted))
        raise UserError(
            f"another layout of ranks ({changes}) with the optimiser's state on NVMe "
            "(deepspeed.zero_optimization.offload_optimizer.device): resume with the saved values, "
            "or without NVMe from a checkpoint written without it"
        )


def load_into(engine: DeepSpeedEngine, saved: SavedEngine) -> None:
    """Put weights, optimiser state, schedule and counters of ``saved`` into a fresh ``engine``.

    Collective under ZeRO-3.

    Raises:
        UserError: the model has other parameters.
    """
    named = {engine.param_names[p]: p for p in engine.module.parameters() if p.requires_grad}
    inner = engine.basic_optimizer
    inner.state.clear()
    left = set(named)
    for state in saved.parameters():
        if state.name not in left:
            raise UserError(f"the checkpoint holds {state.name!r}, which the model does not have")
        left.discard(state.name)
        parameter = named[state.name]
        for tensor, at, first, numel in _places(engine, parameter):
            piece = slice(first, first + numel)
            tensor.data.view(-1)[at : at + numel].copy_(state.master.reshape(-1)[piece])
            _fill_moments(inner, tensor, at, state, piece)
        _set_weights(parameter, state.master)
    if left:
        raise UserError(f"the checkpoint lacks {sorted(left)[:3]}: it is of another model")
    buffers = dict(engine.module.named_buffers())
    for name, value in saved.buffers().items():
        buffers[name].data.copy_(value)
    _set_progress(engine, saved)


def _places(engine: DeepSpeedEngine, parameter: torch.nn.Parameter) -> Iterator[Place]:
    """Where this rank's optimiser holds the parameter: nowhere, in part, or whole."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage == 3:
        index, at, held = optimizer.grad_position[optimizer.get_param_id(parameter)]
        first = dist.get_rank() * held
        numel = max(0, min(held, parameter.ds_numel - first))  # type: ignore[attr-defined]
        yield optimizer.fp32_partitioned_groups_flat[index], at, first, numel
    elif hasattr(parameter, "_hp_mapping"):
        fragment = parameter._hp_mapping
        if fragment is None:
            return
        flats = getattr(optimizer, "single_partition_of_fp32_groups", None)
        flats = optimizer.fp32_groups_flat_partition if flats is None else flats
        here, there = fragment.hp_fragment_address, fragment.lp_fragment_address
        yield flats[fragment.param_group_index], here.start, there.start, here.numel
    elif hasattr(optimizer, "fp16_groups"):
        for masters, weights in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
            for master, weight in zip(masters, weights, strict=True):
                if weight is parameter:
                    yield master, 0, 0, master.numel()
    else:
        yield parameter, 0, 0, parameter.numel()


def _fill_moments(
    optimizer: torch.optim.Optimizer,
    tensor: torch.Tensor,
    at: int,
    state: ParameterState,
    piece: slice,
) -> None:
    held = optimizer.state[tensor] if state.moments else {}
    for key, value in state.moments.items():
        if key not in held:
            held[key] = torch.zeros_like(tensor, requires_grad=False)
        part = value.reshape(-1)[piece]
        held[key].view(-1)[at : at + part.numel()].copy_(part)
    if state.step is not None:
        # torch counts in a tensor, which its fused AdamW wants beside the weights.
        in_torch = isinstance(optimizer, torch.optim.AdamW)
        held[STEP] = torch.tensor(state.step, device=tensor.device) if in_torch else int(state.step)


def _set_weights(parameter: torch.nn.Parameter, master: torch.Tensor) -> None:
    """The weights that forward uses, in the model's dtype."""
    if not hasattr(parameter, "ds_id"):
        parameter.data.copy_(master)
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        if dist.get_rank() == 0:
            parameter.data.copy_(master)


def _set_progress(engine: DeepSpeedEngine, saved: SavedEngine) -> None:
    """Schedule, learning rates and counters."""
    scheduler = engine.lr_scheduler
    scheduler.load_state_dict(saved.schedule)
    for group, rate in zip(engine.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = rate
    for name, value in saved.counters.items():
        setattr(engine, name, value)
