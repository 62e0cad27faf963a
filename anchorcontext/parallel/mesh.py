"""The ranks of a run as a dp x sp mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..errors import UserError


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands: ``rank = dp_rank * sp + sp_rank``.

    The ranks of an SP group share windows; ranks with the same ``sp_rank`` hold different ones, and
    need no group: DeepSpeed reduces over all ranks.
    """

    world_size: int
    rank: int
    dp: int
    sp: int
    sp_group: dist.ProcessGroup | None = None
    """None where it would have one member."""

    @property
    def dp_rank(self) -> int:
        """Which windows this rank works on."""
        return self.rank // self.sp

    @property
    def sp_rank(self) -> int:
        """Which part of each window this rank holds."""
        return self.rank % self.sp


def build_mesh(sp: int) -> Mesh:
    """The mesh of the default process group (or of a single process without one).

    SP groups are consecutive ranks, so that they stay inside a node where they fit. Collective:
    every rank calls it.

    Raises:
        UserError: ``sp`` does not divide the world size.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    if sp < 1 or world_size % sp:
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise UserError(
            f"parallel.sp = {sp} with {world_size} ranks: sp must divide the number of ranks; use "
            f"one of {divisors}, or launch another number of ranks"
        )
    dp = world_size // sp
    groups = [list(range(start, start + sp)) for start in range(0, world_size, sp)]
    mesh = Mesh(world_size, rank, dp, sp, _own_group(groups, rank))
    if mesh.sp_group is not None:
        warm_up(mesh.sp_group)
    return mesh


def warm_up(group: dist.ProcessGroup) -> None:
    """One tiny all-reduce: NCCL wants every rank of a group in its first operation, and the
    point-to-point messages of a plan may involve only some of them."""
    dist.all_reduce(torch.zeros(1, device=group_device(group)), group=group)


def group_device(group: dist.ProcessGroup) -> torch.device:
    """The device that the group's collectives take."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _options() -> Any:
    """On NCCL, messages start before attention that waits as well: its blocks would fill the device
    first, and NCCL's share no multiprocessor with others (NVIDIA/nccl issue 689)."""
    if dist.get_backend() != "nccl":
        return None
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)


def _own_group(groups: list[list[int]], rank: int) -> dist.ProcessGroup | None:
    """All ranks create all groups, in one order; each keeps its own."""
    own = None
    for ranks in groups:
        if len(ranks) > 1:
            group = dist.new_group(ranks, pg_options=_options())
            if rank in ranks:
                own = group
    return own
