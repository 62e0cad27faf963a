"""One device: what each mode costs against full attention, in time and in visible pairs.

An engine that wastes nothing takes time in proportion to the visible pairs; ``efficiency`` is how
near it comes, with full causal attention on the same tensors in the same run as the yardstick.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..markdown import markdown_table
from ..modes import MODES
from ..parallel import distributed_attention, make_plan
from ..plan.mixes import mix_lengths
from ..window import Window


@dataclass(frozen=True)
class ModeResult:
    """One mode on one window."""

    mode: str
    documents: int
    pairs_of_full: float
    """Visible pairs over those of mode ``full``."""
    seconds: float
    """Forward and backward of one layer's attention; the fastest repeat."""
    time_of_full: float
    """Seconds over those of mode ``full``."""

    @property
    def efficiency(self) -> float:
        """Pairs per second over those of mode ``full``."""
        return self.pairs_of_full / self.time_of_full


def bench_modes(
    *,
    window_tokens: int,
    mix: str,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    repeats: int,
    seed: int = 0,
) -> list[ModeResult]:
    """Time attention over one window in every mode, the modes in turn, ``repeats`` times.

    Raises:
        UserError: there is no such mix.
    """
    lengths = mix_lengths(mix, window_tokens - 1, seed)
    window = Window.from_documents([[0] * int(length) for length in lengths], anchor_id=0)
    torch.manual_seed(seed)
    q, k, v, dout = (
        torch.randn(1, heads, window_tokens, head_dim, dtype=dtype, device=device)
        for heads in (num_heads, num_kv_heads, num_kv_heads, num_heads)
    )
    plans = {mode: make_plan(window.with_mode(mode)) for mode in MODES}
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(repeats):
        for mode, plan in plans.items():
            own_q, own_k, own_v = (x.clone().requires_grad_() for x in (q, k, v))
            _synchronise(device)
            start = time.perf_counter()
            distributed_attention(own_q, own_k, own_v, plan).backward(dout)
            _synchronise(device)
            seconds[mode].append(time.perf_counter() - start)
    full_seconds, full_pairs = min(seconds["full"]), plans["full"].num_pairs
    return [
        ModeResult(
            mode=mode,
            documents=len(lengths),
            pairs_of_full=plan.num_pairs / full_pairs,
            seconds=min(seconds[mode]),
            time_of_full=min(seconds[mode]) / full_seconds,
        )
        for mode, plan in plans.items()
    ]


def table_rows(results: Sequence[ModeResult]) -> list[tuple[str, ...]]:
    """Rows of the printed table."""
    return [
        (
            result.mode,
            f"{result.pairs_of_full:.4f}",
            f"{result.time_of_full:.4f}",
            f"{result.efficiency:.2f}",
        )
        for result in results
    ]


HEADERS = ("mode", "pairs / full", "time / full", "pairs a second / full")


def modes_markdown(results: Sequence[ModeResult], setting: str, command: str) -> str:
    """The section of docs/benchmarks.md."""
    return "\n\n".join(
        [
            "## Modes on one device",
            f"Written by `{command}`. {setting} Forward and backward, the fastest repeat, all "
            "modes in turn in one run.",
            markdown_table(HEADERS, table_rows(results)),
        ]
    )


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
