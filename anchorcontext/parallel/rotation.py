"""Rotations of a plan's rows, for an engine that applies RoPE by itself.

Queries and keys then travel unrotated. A rank rotates the rows of other ranks by the positions that
the plan's windows give them; nothing more has to be sent.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from anchorcontext.kernels import Rotation
from anchorcontext.kernels.pinned import to_device

from ..errors import UserError
from ..plan import RingFlashAttnPlan
from .plan import Plan
from .sharding import padded

Tables = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Positions int64 (T,) -> cosines and sines (T, D / 2)."""


def plan_rotations(plan: Plan, tables: Tables, device: torch.device) -> tuple[Rotation, ...]:
    """The rotation of each step of ``plan``: its queries, its key buffer and the anchors.

    Holds ``4 D`` bytes (fp32) for each of the rank's rows and of the key rows of all its steps.

    Raises:
        UserError: the plan's backend attends by itself.
    """
    if isinstance(plan.data, RingFlashAttnPlan):
        raise UserError(
            "backend 'ring_flash_attn' takes rotated queries and keys: leave rotations out, or use "
            "backend 'native'"
        )
    positions = np.concatenate(
        [padded(window, "position_ids", plan.padded_length) for window in plan.windows]
    )
    anchored = [w for w, window in enumerate(plan.windows) if window.mode.anchor]
    tokens = [*plan.data.key_tokens(plan.sp_rank), np.array(anchored, int) * plan.padded_length]
    rows = to_device(torch.from_numpy(positions[np.concatenate(tokens)]), device)
    cos, sin = (table.split([len(part) for part in tokens]) for table in tables(rows))
    return tuple(
        Rotation(cos[0], sin[0], *step, cos[-1], sin[-1])
        for step in zip(cos[:-1], sin[:-1], strict=True)
    )


def check_positions(position_ids: torch.Tensor, plan: Plan) -> None:
    """Refuse positions (B, S) that are not those of the plan's windows.

    Reads the tensor: once a forward, and on a GPU the host waits for it.

    Raises:
        UserError: they differ.
    """
    held = [
        padded(window, "position_ids", plan.padded_length)[
            plan.data.local_indices(plan.sp_rank, index)
        ]
        for index, window in enumerate(plan.windows)
    ]
    expected = torch.from_numpy(np.stack(held)).to(position_ids.device)
    if position_ids.shape != expected.shape or not torch.equal(position_ids, expected):
        raise UserError(
            f"position_ids {tuple(position_ids.shape)} are not those of the plan's windows, by "
            "which keys of other ranks are rotated: call the model with the position_ids of "
            "shard(windows, plan), for the windows the plan was made for"
        )
