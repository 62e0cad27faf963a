"""Every exchange among the ranks of a job against one device: errors, bytes, and what overlaps.

A few minutes on a new machine say whether its links, its NCCL and this package agree, before a run
depends on them. All ranks draw the same tensors; each computes the whole window by itself and its
own rows together with the others, forward and backward, and compares the two.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from ..errors import UserError
from ..parallel import Mesh, Plan, distributed_attention, make_plan
from ..plan.heads import heads_divide
from ..plan.mixes import mix_lengths
from ..train.control import Control
from ..window import Window

EXCHANGES = ("ring", "gather", "ulysses", "hybrid")
LAYOUTS = ("contiguous", "zigzag", "balanced")
MODES = ("full", "intra_doc", "anchor")
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float64: 1e-10}
"""Largest error allowed, relative to the largest value: a few roundings of the dtype."""


@dataclass(frozen=True)
class Settings:
    """The attention layer that is measured, and on which windows."""

    tokens: int = 16384
    mix: str = "slimpajama"
    heads: tuple[int, int] = (8, 2)
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    repeats: int = 3
    modes: tuple[str, ...] = MODES


@dataclass(frozen=True)
class Result:
    """One exchange on one window."""

    mode: str
    layout: str
    exchange: str
    error: float
    """Of the output and three gradients, relative to the largest value; the worst rank's."""
    seconds: float
    """Forward and backward: the slowest rank's, median."""
    seconds_apart: float
    """The same when every step waits for its rows before it computes."""
    seconds_exposed: float
    """Of ``seconds``, in which the busiest rank's computation waited for rows."""
    bytes_sent: int
    """By the rank that sent most."""
    as_predicted: bool
    """Every rank sent what its plan said, to the byte."""
    limit: float

    @property
    def passed(self) -> bool:
        """Whether numbers and bytes are right."""
        return self.error <= self.limit and self.as_predicted


def measure(
    settings: Settings, mesh: Mesh, control: Control, device: torch.device
) -> Iterator[Result]:
    """Measure case after case; collective over all ranks, which get the same results.

    Raises:
        UserError: the job has one rank.
    """
    if mesh.sp_group is None:
        raise UserError(
            "bench exchanges needs several ranks: start it with RANKS=2 launch/torchrun.sh bench "
            "exchanges, or with one rank for each GPU"
        )
    for mode in settings.modes:
        rows = _draw(settings, mode, device)
        alone = _Case(make_plan(rows.window), rows, settings.dtype)
        expected = alone.run()
        for layout, exchange in product(LAYOUTS, EXCHANGES):
            options = _options(exchange, mesh.sp, settings.heads)
            if options is None or (exchange == "ulysses" and layout != LAYOUTS[0]):
                continue  # heads do not divide; ulysses alone lays tokens out in one way
            cases = [
                _Case(
                    make_plan(rows.window, mesh.sp_group, layout, **options, overlap=overlap),
                    rows,
                    settings.dtype,
                )
                for overlap in (True, False)
            ]
            yield _compare(cases, expected, settings, control, (mode, layout, exchange))


def _options(exchange: str, sp: int, heads: tuple[int, int]) -> dict | None:
    """How `make_plan` is asked for an exchange; None where heads or ranks do not divide."""
    team = sp if exchange == "ulysses" else 2 if exchange == "hybrid" else 1
    if not heads_divide(*heads, team) or sp % team or (exchange == "hybrid" and sp < 4):
        return None
    return {"exchange": "ring", "ulysses": 2} if team == 2 < sp else {"exchange": exchange}


@dataclass(frozen=True)
class _Rows:
    window: Window
    tensors: tuple[torch.Tensor, ...]
    """q, k, v and dout, (1, H, L, D) each."""


def _draw(settings: Settings, mode: str, device: torch.device) -> _Rows:
    lengths = mix_lengths(settings.mix, settings.tokens - (mode == "anchor"))
    documents = [[1] * int(n) for n in lengths]  # ids play no part
    window = Window.from_documents(documents, anchor_id=0 if mode == "anchor" else None, mode=mode)
    generator = torch.Generator().manual_seed(0)
    num_heads, num_kv_heads = settings.heads
    shape = (window.num_tokens, settings.head_dim)
    drawn = [
        torch.randn(1, heads, *shape, generator=generator)
        for heads in (num_heads, num_kv_heads, num_kv_heads, num_heads)
    ]
    return _Rows(window, tuple(x.to(device, settings.dtype) for x in drawn))


class _Case:
    """A plan and this rank's rows of the tensors."""

    def __init__(self, plan: Plan, rows: _Rows, dtype: torch.dtype) -> None:
        self.plan = plan
        held = plan.data.local_indices(plan.sp_rank, 0)
        real = np.flatnonzero(held < plan.length)
        self.device = rows.tensors[0].device
        self.tokens = torch.from_numpy(held[real]).to(self.device)
        self.real = torch.from_numpy(real).to(self.device)
        self._given = [self._local(x) for x in rows.tensors]
        num_heads, num_kv_heads = (x.shape[1] for x in rows.tensors[:2])
        self.predicted = plan.predicted_bytes(
            num_layers=1,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=rows.tensors[0].shape[3],
            dtype=dtype,
        )
        plan.meter.measure_on(self.device)

    def _local(self, whole: torch.Tensor) -> torch.Tensor:
        local = whole.new_zeros(*whole.shape[:2], self.plan.local_length, whole.shape[3])
        return local.index_copy_(2, self.real, whole.index_select(2, self.tokens))

    def run(self) -> list[torch.Tensor]:
        """Output and the gradients of q, k and v."""
        *leaves, dout = (x.detach() for x in self._given)
        leaves = [x.requires_grad_() for x in leaves]
        out = distributed_attention(leaves[0], leaves[1], leaves[2], self.plan)
        out.backward(dout)
        return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]

    def error(self, expected: list[torch.Tensor]) -> float:
        """Largest difference from the whole window's results, relative to their largest value."""
        worst = 0.0
        for mine, whole in zip(self.run(), expected, strict=True):
            mine = mine.index_select(2, self.real).double()
            theirs = whole.index_select(2, self.tokens).double()
            if mine.numel():
                error = (mine - theirs).abs().max() / whole.abs().max()
                # A NaN, of the whole window's results too, is the largest error there is.
                worst = max(worst, float(torch.nan_to_num(error, nan=torch.inf)))
        return worst

    def seconds(self, control: Control) -> float:
        """One run, all ranks having begun together."""
        self._finish()
        control.barrier()
        started = time.perf_counter()
        self.run()
        self._finish()
        return time.perf_counter() - started

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _compare(
    cases: list[_Case],
    expected: list[torch.Tensor],
    settings: Settings,
    control: Control,
    names: tuple[str, str, str],
) -> Result:
    case, apart = cases
    error = max(case.error(expected), apart.error(expected))  # warms up, too
    sent = case.plan.meter.bytes_sent
    case.plan.meter.measure_on(case.device)
    times = [[each.seconds(control) for _ in range(settings.repeats)] for each in (case, apart)]
    exposed = case.plan.meter.exchange.seconds / settings.repeats
    found = control.gather((error, times, exposed, sent, sent == case.predicted))
    together, without = (
        statistics.median(max(run) for run in zip(*(rank[1][i] for rank in found), strict=True))
        for i in range(2)
    )
    return Result(
        *names,
        error=max(rank[0] for rank in found),
        seconds=together,
        seconds_apart=without,
        seconds_exposed=max(rank[2] for rank in found),
        bytes_sent=max(rank[3] for rank in found),
        as_predicted=all(rank[4] for rank in found),
        limit=LIMITS[settings.dtype],
    )


HEADERS = ("mode", "layout", "exchange", "error", "ms", "ms apart", "ms exposed", "MiB sent", "")


def table_row(result: Result) -> tuple[str, ...]:
    """A result as the columns of `HEADERS`."""
    right = "" if result.passed else "WRONG" if result.as_predicted else "WRONG BYTES"
    milliseconds = (result.seconds, result.seconds_apart, result.seconds_exposed)
    return (
        *(result.mode, result.layout, result.exchange, f"{result.error:.1e}"),
        *(f"{1e3 * seconds:,.1f}" for seconds in milliseconds),
        f"{result.bytes_sent / 2**20:,.2f}",
        right,
    )
