"""Settings that an engine serves beside plain tile lists, checked on one device for the GPU check:
RoPE that it applies by itself, and exact rows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from anchorcontext.kernels import SoftmaxState, Tiles, get_engine, rotate

from ..parallel import distributed_attention, make_plan, plan_rotations
from ..parallel.rotation import Tables
from ..window import Window

HEADERS = ("setting", "dtype", "engine", "error")
HEAD_DIM = 128


@dataclass(frozen=True)
class SettingError:
    """What an engine made of a setting."""

    setting: str
    dtype: str
    engine: str
    error: float
    """Largest relative error of output and gradients; for exact rows, how many of them differ."""


def rope_in_engine(
    device: torch.device, dtype: torch.dtype, lengths: tuple[int, ...] = (70, 1, 700, 13, 240)
) -> SettingError:
    """Output and gradients of mode ``anchor`` from unrotated queries and keys, against fp64."""
    documents = [[1] * length for length in lengths]
    plan = make_plan(Window.from_documents(documents, anchor_id=0))
    generator = torch.Generator().manual_seed(0)
    drawn = [
        torch.randn(1, heads, plan.local_length, HEAD_DIM, generator=generator).to(dtype)
        for heads in (4, 2, 2, 4)
    ]

    def run(device: torch.device, dtype: torch.dtype, *, by_engine: bool) -> list[torch.Tensor]:
        q, k, v, dout = (x.to(device, dtype) for x in drawn)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        rotations = plan_rotations(plan, _tables(torch.promote_types(dtype, torch.float32)), device)
        if by_engine:
            out = distributed_attention(q, k, v, plan, rotations=rotations)
        else:
            turn = rotations[0].q_cos, rotations[0].q_sin
            q, k = (rotate(x[0].transpose(0, 1), *turn).transpose(0, 1)[None] for x in (q, k))
            out = distributed_attention(q, k, v, plan)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    expected = run(torch.device("cpu"), torch.float64, by_engine=False)
    found = [x.cpu().double() for x in run(device, dtype, by_engine=True)]
    errors = [(a - b).norm() / b.norm() for a, b in zip(found, expected, strict=True)]
    error = float(torch.stack(errors).max())  # NaN where one of them is
    name = plan.engine(device, dtype, rotates=True).name
    return SettingError("RoPE by the engine", _short(dtype), name, error)


def _tables(dtype: torch.dtype) -> Tables:
    """RoPE of base 10,000; angles in fp64, cosines and sines in ``dtype``."""

    def tables(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        share = torch.arange(HEAD_DIM // 2, dtype=torch.float64, device=positions.device)
        angles = positions[:, None] * 10000.0 ** -(share / (HEAD_DIM // 2))
        return angles.cos().to(dtype), angles.sin().to(dtype)

    return tables


def exact_rows(device: torch.device, dtype: torch.dtype, length: int = 1500) -> SettingError:
    """A document's rows in one tile, and cut into pieces at other rows: their bits are the same."""
    engine = get_engine(device=device, dtype=dtype, exact=True)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(length, heads, HEAD_DIM, generator=generator).to(device, dtype)
        for heads in (4, 2, 2)
    )
    found = []
    for gap, edges in ((0, [0, length]), (37, [0, 5, 200, 641, 1100, length])):
        tiles, row = [], gap
        for first, stop in pairwise(edges):
            tiles.append((row, row + stop - first, gap, gap + stop, 1))
            row += stop - first + gap
        held = torch.cat([torch.arange(a, b) for a, b, *_ in tiles]).to(device)
        rows = torch.zeros(row, *q.shape[1:], dtype=dtype, device=device)
        rows[held] = q
        state = SoftmaxState.empty(rows)
        ahead = k.new_zeros(gap, *k.shape[1:])
        keys, values = torch.cat([ahead, k]), torch.cat([ahead, v])
        scale = HEAD_DIM**-0.5
        engine.forward(rows, keys, values, Tiles(np.array(tiles), exact=True), scale, state)
        found.append((state.out[held], state.lse[held]))
    (out, lse), (other_out, other_lse) = found
    differ = (out != other_out).flatten(1).any(1) | (lse != other_lse).any(1)
    return SettingError("exact: rows that differ", _short(dtype), engine.name, int(differ.sum()))


def table_rows(results: list[SettingError]) -> list[tuple[str, ...]]:
    """Rows of the printed table."""
    return [(r.setting, r.dtype, r.engine, f"{r.error:.1e}") for r in results]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
