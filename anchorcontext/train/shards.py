"""What DeepSpeed wrote, read back parameter by parameter, whatever the ZeRO stage and the ranks.

The optimiser's state is cut in several ways: not at all without ZeRO, in flat groups split over the
ranks under ZeRO-1 and 2 and in DeepSpeed's bf16 optimiser, and each parameter split over the ranks
under ZeRO-3. Files are memory-mapped and one parameter at a time is put together, so reading takes
the memory of one parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UserError
from .checkpoint_files import ENGINE_TAG, Checkpoint
from .launch import tell_deepspeed_the_accelerator

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

STEP = "step"
NAMES, TIED = "anchorcontext_parameter_groups", "anchorcontext_tied"


@dataclass(frozen=True)
class ParameterState:
    """One parameter as the optimiser sees it, whole, on the CPU."""

    name: str
    """In ``TrainModel``."""
    master: torch.Tensor
    """fp32 weights."""
    moments: dict[str, torch.Tensor]
    """The optimiser's tensors of the parameter's shape: ``exp_avg`` and ``exp_avg_sq`` of AdamW."""
    step: float | None
    """Updates so far; None where the optimiser does not count them, or there were none."""


def names_for_reading(engine: DeepSpeedEngine) -> dict[str, Any]:
    """What the files must also say so that ``SavedEngine`` can read them without a model."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    names: list[list[str]] = []
    if engine.zero_optimization_stage() == 0:
        groups = getattr(engine.optimizer, "fp16_groups", None)
        if groups is None:
            groups = [group["params"] for group in engine.optimizer.param_groups]
        names = [[engine.param_names[parameter] for parameter in group] for group in groups]
    return {NAMES: names, TIED: tied}


class SavedEngine:
    """The engine's part of a complete checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        tell_deepspeed_the_accelerator()  # unpickling imports DeepSpeed's dataclasses
        self.stage = checkpoint.layout.zero_stage
        self._folder = checkpoint.path / ENGINE_TAG
        self._world_size = checkpoint.layout.world_size
        prefix = "zero_pp_rank_0_" if self.stage == 3 else ""
        self._model = self._load(f"*{prefix}mp_rank_00_model_states.pt")

    @property
    def schedule(self) -> dict[str, Any]:
        """State of the learning rate schedule."""
        return dict(self._model["lr_scheduler"])

    @property
    def counters(self) -> dict[str, int]:
        """DeepSpeed's own counters of steps and samples."""
        names = ("global_steps", "global_samples", "skipped_steps")
        return {name: int(self._model[name]) for name in names}

    @property
    def tied(self) -> dict[str, str]:
        """Further names of parameters that have several, and the name each is found under."""
        return dict(self._model[TIED])

    def buffers(self) -> dict[str, torch.Tensor]:
        """Persistent buffers, by name."""
        module = self._model["module"]
        return {name: module[name] for name in self._model["buffer_names"] if name in module}

    def parameters(self) -> Iterator[ParameterState]:
        """Every trained parameter once, in the order of the optimiser.

        Raises:
            UserError: a rank's file is missing or does not hold what it should.
        """
        if self.stage == 0:
            return self._unsharded()
        return self._partitioned() if self.stage == 3 else self._flat_groups()

    def _unsharded(self) -> Iterator[ParameterState]:
        """Without ZeRO: everything in rank 0's file; bf16 runs have masters in the optimiser."""
        saved, groups = self._model["optimizer"], self._model[NAMES]
        if "fp32_groups" in saved:
            masters = [master for group in saved["fp32_groups"] for master in group]
            states = saved["optimizer_state_dict"]["state"]
        else:
            masters = [self._model["module"][name] for names in groups for name in names]
            states = saved["state"]
        names = [name for group in groups for name in group]
        for index, (name, master) in enumerate(zip(names, masters, strict=True)):
            state = states.get(index, {})
            moments = {key: v for key, v in state.items() if _is_moment(v, master)}
            yield ParameterState(name, master.detach().float(), moments, _step_of(state))

    def _flat_groups(self) -> Iterator[ParameterState]:
        """ZeRO-1 and 2, and the bf16 optimiser: every rank says where its fragments lie."""
        for group, shapes in enumerate(self._model["param_shapes"]):
            for name, shape in shapes.items():
                pieces = []
                for part in self._parts:
                    place = part["param_slice_mappings"][group].get(name)
                    if place is not None:
                        flat = part["single_partition_of_fp32_groups"][group].detach()
                        state = part["base_optimizer_state"]["state"].get(group, {})
                        pieces.append(_cut(flat, state, place.start, place.numel))
                yield self._joined(name, shape, pieces)

    def _partitioned(self) -> Iterator[ParameterState]:
        """ZeRO-3: rank r holds the r-th of equal pieces of each parameter, the last one padded."""
        world, group, offset = self._world_size, 0, 0
        flats = [part["fp32_flat_groups"] for part in self._parts]
        states = [part["optimizer_state_dict"]["state"] for part in self._parts]
        for name, shape in [i for shapes in self._model["param_shapes"] for i in shapes.items()]:
            numel = -(-shape.numel() // world)
            if offset == flats[0][group].numel():
                group, offset = group + 1, 0
            pieces = [
                _cut(flat[group].detach(), state.get(group, {}), offset, numel)
                for flat, state in zip(flats, states, strict=True)
            ]
            offset += numel
            yield self._joined(name, shape, pieces)

    def _joined(self, name: str, shape: torch.Size, pieces: Sequence[_Piece]) -> ParameterState:
        found = sum(piece.master.numel() for piece in pieces)
        if found < shape.numel():
            raise UserError(
                f"{self._folder}: {found} of {shape.numel()} elements of {name} are in the files "
                f"of {self._world_size} ranks; take another checkpoint"
            )

        def whole(parts: list[torch.Tensor]) -> torch.Tensor:
            joined = torch.cat(parts) if len(parts) > 1 else parts[0]
            return joined[: shape.numel()].view(shape)

        moments = {key: whole([p.moments[key] for p in pieces]) for key in pieces[0].moments}
        return ParameterState(name, whole([p.master for p in pieces]), moments, pieces[0].step)

    @functools.cached_property
    def _parts(self) -> list[dict[str, Any]]:
        """The optimiser's state of each rank."""
        names = [f"*zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in range(self._world_size)]
        return [self._load(name)["optimizer_state_dict"] for name in names]

    def _load(self, pattern: str) -> dict[str, Any]:
        files: list[Path] = list(self._folder.glob(pattern))
        if len(files) != 1:
            raise UserError(
                f"{self._folder} holds {len(files)} files {pattern}, not one; take another "
                "checkpoint"
            )
        return dict(torch.load(files[0], map_location="cpu", weights_only=False, mmap=True))


@dataclass(frozen=True)
class _Piece:
    """A rank's part of a parameter, flat."""

    master: torch.Tensor
    moments: dict[str, torch.Tensor]
    step: float | None


def _cut(flat: torch.Tensor, state: Mapping[str, Any], start: int, numel: int) -> _Piece:
    """``numel`` elements of a rank's flat group; moments may be padded beyond the weights."""
    piece = slice(start, start + numel)
    moments = {
        key: value[piece]
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() >= flat.numel()
    }
    return _Piece(flat[piece], moments, _step_of(state))


def _is_moment(value: object, master: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == master.shape and value.dim() > 0


def _step_of(state: Mapping[str, Any]) -> float | None:
    return float(state[STEP]) if STEP in state else None
