"""Small CPU collectives by which ranks agree: counts, errors, files written.

They run on gloo, beside the device's own communication, so that agreeing costs no device
synchronisation. On CPU jobs the default group is gloo already and serves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..errors import UserError


class RankError(RuntimeError):
    """Another rank failed; raised on every rank alike, with that rank's error as text."""


@dataclass(frozen=True)
class Control:
    """The gloo group of all ranks, or nothing to talk to in a world of one."""

    group: dist.ProcessGroup | None
    rank: int
    world_size: int

    @classmethod
    def create(cls) -> Control:
        """The control group of the job; collective: every rank calls it."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(group=None, rank=0, world_size=1)
        default = dist.group.WORLD
        group = default if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        return cls(group=group, rank=dist.get_rank(), world_size=dist.get_world_size())

    def sum(self, values: Sequence[int]) -> list[int]:
        """Element-wise sum of int64 values over all ranks."""
        total = torch.tensor(list(values), dtype=torch.int64)
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        return [int(value) for value in total]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's picklable value, in rank order, on every rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def from_first(self, value: Any) -> Any:
        """Rank 0's picklable value, on every rank."""
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.sum([0])

    @contextlib.contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Run a block that may fail on some ranks only; then all of them fail, with that error.

        The block must hold no collective: a rank that failed before it would leave the others
        waiting. ``doing`` completes "failed while ...".

        Raises:
            UserError: the first failing rank's mistake was the user's.
            RankError: any other error of another rank; the failing rank raises its own.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        self.agree(error, doing)

    def agree(self, error: Exception | None, doing: str) -> None:
        """Raise on every rank if any rank brings an error; see ``together``."""
        if self.sum([error is not None])[0] == 0:
            return
        kind = None if error is None else isinstance(error, UserError)
        reports = self.gather(None if error is None else (kind, type(error).__name__, str(error)))
        rank = next(index for index, report in enumerate(reports) if report is not None)
        is_user_error, name, text = reports[rank]
        if is_user_error:
            raise UserError(_with_ranks(text, reports, rank)) from error
        if error is not None:
            raise error
        raise RankError(f"rank {rank} failed while {doing}: {name}: {text}")


def _with_ranks(text: str, reports: list[Any], rank: int) -> str:
    """The message as it is where all ranks share it, else with the rank that has it."""
    shared = all(report is not None and report[2] == text for report in reports)
    return text if shared else f"rank {rank}: {text}"
