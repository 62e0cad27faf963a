"""Cutting windows into the ranks' shards and putting them together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from ..errors import UserError
from ..modes import IGNORE, PADDING
from ..window import Window
from ..words import counted
from .plan import Plan

_FILL = {"input_ids": 0, "labels": IGNORE, "doc_ids": PADDING}


@dataclass(frozen=True)
class LocalShard:
    """The tokens of a micro-batch that one rank holds; every field int64 (B, S).

    Padding has input id 0, label -100, document -1 and counts its positions from 0.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    doc_ids: torch.Tensor


def shard(
    windows: Window | Sequence[Window], plan: Plan, device: torch.device | str | None = None
) -> LocalShard:
    """This rank's part of the windows that ``plan`` was made for.

    Positions and labels are those of the whole window: nothing is renumbered or shifted here.

    Raises:
        UserError: the windows are not those of the plan.
    """
    batch = [windows] if isinstance(windows, Window) else list(windows)
    if len(batch) != plan.batch_size or not all(map(_same_documents, batch, plan.windows)):
        raise UserError(
            f"{counted(len(batch), 'window')} of {[w.num_tokens for w in batch]} tokens for a plan "
            f"of {plan.batch_size} of {[w.num_tokens for w in plan.windows]}: number, mode and "
            "documents must be the plan's, which masks by them; shard the windows the plan was "
            "made for, or make a plan for these"
        )
    rows = [plan.data.local_indices(plan.sp_rank, index) for index in range(len(batch))]

    def local(name: str) -> torch.Tensor:
        parts = [
            padded(window, name, plan.padded_length)[held]
            for window, held in zip(batch, rows, strict=True)
        ]
        return torch.from_numpy(np.stack(parts)).to(device or "cpu")

    return LocalShard(*map(local, ("input_ids", "position_ids", "labels", "doc_ids")))


def unshard(local: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Gather (B, S, ...) shards into (B, L, ...) on every rank, padding dropped, in token order.

    Collective over the SP group; not differentiable (the result is detached).
    """
    if local.shape[:2] != (plan.batch_size, plan.local_length):
        raise UserError(
            f"unshard got shape {tuple(local.shape)}: the plan's shards start with "
            f"({plan.batch_size}, {plan.local_length}), windows x tokens a rank"
        )
    mine = local.detach().contiguous()
    shards = [mine]
    if plan.group is not None:
        shards = [torch.empty_like(mine) for _ in range(plan.sp_size)]
        # Bytes travel: no backend then has to know the dtype.
        dist.all_gather(
            [part.view(-1).view(torch.uint8) for part in shards],
            mine.view(-1).view(torch.uint8),
            group=plan.group,
        )
    whole = torch.cat(shards, dim=1)
    windows = []
    for index in range(plan.batch_size):
        ranks = range(plan.sp_size)
        order = np.concatenate([plan.data.local_indices(rank, index) for rank in ranks])
        back = torch.from_numpy(np.argsort(order)[: plan.length]).to(local.device)
        windows.append(whole[index].index_select(0, back))
    return torch.stack(windows)


def _same_documents(window: Window, planned: Window) -> bool:
    """Whether a plan made for ``planned`` masks ``window`` rightly; the tokens may differ."""
    return window is planned or (
        window.mode == planned.mode
        and np.array_equal(window.cu_seqlens, planned.cu_seqlens)
        and np.array_equal(window.segment_docs, planned.segment_docs)
    )


def padded(window: Window, name: str, length: int) -> np.ndarray:
    """An array of ``window`` by its name in `LocalShard`, int64 (length,), padded on the right."""
    values = getattr(window, name)
    extra = length - len(values)
    if name == "position_ids":
        return np.r_[values, np.arange(extra)]
    return np.r_[values, np.full(extra, _FILL[name], dtype=np.int64)]
