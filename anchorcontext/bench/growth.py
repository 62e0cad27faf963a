"""How attention grows with the window: time and memory of one layer on 1, 2 and 4 ranks.

Every figure comes from ranks that were started for it: their memory holds nothing else. Times are
of one thread a rank; where ranks share cores, their processor time tells what they would take on
cores of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from ..markdown import markdown_table
from ..parallel import distributed_attention, make_plan
from ..plan.mixes import mix_lengths
from ..testing import run_distributed
from ..watch.flops import ATTENTION_BACKWARD_FLOPS, ATTENTION_FORWARD_FLOPS
from ..window import Window
from ..words import counted

LENGTHS = (16384, 32768, 65536, 131072)
SP_SIZES = (1, 2, 4)
MARKERS = {1: "o", 2: "^", 4: "s"}
EXCHANGES = {"anchor": "gather", "full": "ring"}
"""What moves least where rows are few, and what holds least where they are many."""
WARM_UP_TOKENS = 256
TIMEOUT_SECONDS = 900.0
PRELOAD = ("anchorcontext.bench.growth",)
MIB = 2**20


@dataclass(frozen=True)
class Setting:
    """One layer's attention on one window."""

    mode: str
    window_tokens: int
    sp: int
    mix: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    seed: int

    def window(self, tokens: int) -> Window:
        """Documents of the mix behind an anchor, in the mode; the token ids do not matter."""
        lengths = mix_lengths(self.mix, tokens - 1, self.seed)
        return Window(np.zeros(tokens, dtype=np.int64), np.cumsum([0, 1, *lengths]), self.mode)


@dataclass(frozen=True)
class RankGrowth:
    """One rank's forward and backward."""

    seconds: float
    processor_seconds: float
    peak_bytes: int
    """Resident set at its highest over that before the rank made its q, k, v and gradient."""
    pairs: float
    """Visible pairs that it computed."""


@dataclass(frozen=True)
class GrowthResult:
    """One mode, window and number of ranks."""

    mode: str
    exchange: str
    window_tokens: int
    documents: int
    sp: int
    flops: float
    """Modelled, of all ranks: 14 D a visible pair and query head."""
    flops_ratio: float
    """Over those of mode full at the shortest window."""
    seconds: float
    """Until the last rank was ready."""
    processor_seconds: float
    """Of the busiest rank."""
    time_ratio: float
    """``processor_seconds`` over those of mode full at the shortest window on one rank."""
    peak_bytes: int
    """Of the rank that needed most."""


def bench_growth(
    *,
    mix: str,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    seed: int = 0,
    lengths: Sequence[int] = LENGTHS,
    sp_sizes: Sequence[int] = SP_SIZES,
    tell: Callable[[str], None] = lambda line: None,
) -> list[GrowthResult]:
    """Measure every mode, window length and number of ranks, each on fresh ranks.

    Raises:
        UserError: there is no such mix.
    """
    results: list[GrowthResult] = []
    flops_per_pair = (ATTENTION_FORWARD_FLOPS + ATTENTION_BACKWARD_FLOPS) * head_dim * num_heads
    first: tuple[float, float] | None = None
    for mode in ("full", "anchor"):
        for tokens in lengths:
            for sp in sp_sizes:
                setting = Setting(
                    mode, tokens, sp, mix, num_heads, num_kv_heads, head_dim, dtype, seed
                )
                ranks = run_distributed(
                    measure,
                    sp,
                    setting,
                    timeout=TIMEOUT_SECONDS,
                    group_timeout=TIMEOUT_SECONDS,
                    preload=PRELOAD,
                )
                flops = flops_per_pair * sum(rank.pairs for rank in ranks)
                busiest = max(rank.processor_seconds for rank in ranks)
                first = first or (flops, busiest)
                results.append(
                    GrowthResult(
                        mode=mode,
                        exchange=EXCHANGES[mode],
                        window_tokens=tokens,
                        documents=len(mix_lengths(mix, tokens - 1, seed)),
                        sp=sp,
                        flops=flops,
                        flops_ratio=flops / first[0],
                        seconds=max(rank.seconds for rank in ranks),
                        processor_seconds=busiest,
                        time_ratio=busiest / first[1],
                        peak_bytes=max(rank.peak_bytes for rank in ranks),
                    )
                )
                tell(
                    f"{mode}, {tokens:,} tokens, {counted(sp, 'rank')}: "
                    f"{results[-1].seconds:.2f} s, {results[-1].peak_bytes / MIB:.0f} MiB a rank"
                )
    return results


def measure(rank: int, world_size: int, setting: Setting) -> RankGrowth:
    """One forward and backward on this rank, after one on a tiny window."""
    _attend(setting, WARM_UP_TOKENS)
    return _attend(setting, setting.window_tokens)


def _attend(setting: Setting, tokens: int) -> RankGrowth:
    plan = make_plan(
        setting.window(tokens), dist.group.WORLD, "auto", EXCHANGES[setting.mode], verify=False
    )
    generator = torch.Generator().manual_seed(plan.sp_rank)
    before = _reset_peak()
    q, k, v, dout = (
        torch.randn(
            1, heads, plan.local_length, setting.head_dim, generator=generator, dtype=setting.dtype
        )
        for heads in (
            setting.num_heads,
            setting.num_kv_heads,
            setting.num_kv_heads,
            setting.num_heads,
        )
    )
    for x in (q, k, v):
        x.requires_grad_()
    dist.barrier()
    start, processor = time.perf_counter(), time.process_time()
    distributed_attention(q, k, v, plan).backward(dout)
    processor = time.process_time() - processor
    return RankGrowth(
        seconds=time.perf_counter() - start,
        processor_seconds=processor,
        peak_bytes=_resident("VmHWM") - before,
        pairs=plan.num_pairs,
    )


def _reset_peak() -> int:
    """Let the highest resident set start anew; returns the present one, bytes (proc(5))."""
    Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def growth_rows(results: Sequence[GrowthResult]) -> list[tuple[str, ...]]:
    """One row a mode and window: FLOPs, then time and memory for each number of ranks."""
    rows = []
    for mode, tokens in dict.fromkeys((r.mode, r.window_tokens) for r in results):
        mine = [r for r in results if (r.mode, r.window_tokens) == (mode, tokens)]
        rows.append(
            (
                f"{mode} ({mine[0].exchange})",
                f"{tokens:,}",
                f"{mine[0].flops_ratio:.3f}",
                *(f"{r.time_ratio:.3f}" for r in mine),
                *(f"{r.peak_bytes / MIB:.0f}" for r in mine),
            )
        )
    return rows


def growth_headers(results: Sequence[GrowthResult]) -> tuple[str, ...]:
    """Of :func:`growth_rows`."""
    sizes = list(dict.fromkeys(r.sp for r in results))
    return (
        "mode (exchange)",
        "tokens",
        "FLOPs",
        *(f"time, sp {sp}" for sp in sizes),
        *(f"MiB a rank, sp {sp}" for sp in sizes),
    )


def growth_markdown(
    results: Sequence[GrowthResult], setting: str, command: str, figure: str | None = None
) -> str:
    """The section of docs/benchmarks.md."""
    parts = [
        "## Growth with the window",
        f"Written by `{command}`. {setting} Forward and backward of one layer's attention; every "
        "figure from ranks started for it, one thread each.",
        "FLOPs are modelled, of all ranks; time is the processor time of the busiest rank; both "
        f"over mode {results[0].mode} at {results[0].window_tokens:,} tokens on one rank. Memory "
        "is the highest resident set over that before the rank made its queries, keys, values and "
        "the output's gradient.",
        markdown_table(growth_headers(results), growth_rows(results)),
    ]
    if figure is not None:
        parts.append(f"![Time and memory by the window's length]({figure})")
    return "\n\n".join(parts)


def draw_growth(results: Sequence[GrowthResult], path: Path) -> None:
    """Draw time and memory against the window's length, a line a mode and number of ranks.

    Raises:
        UserError: matplotlib is not installed, or does not know the format.
    """
    from ..watch.draw import new_figure, save_figure

    figure = new_figure(width=12.0, height=4.8)
    panels: tuple[tuple[str, Callable[[GrowthResult], float]], ...] = (
        ("processor time of the busiest rank\nover full at the shortest window on one rank", _time),
        ("peak memory a rank, MiB", _memory),
    )
    colors = {"full": "tab:red", "anchor": "tab:blue"}
    for index, (title, value) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), index + 1)
        for mode, sp in dict.fromkeys((r.mode, r.sp) for r in results):
            mine = [r for r in results if (r.mode, r.sp) == (mode, sp)]
            axes.plot(
                [r.window_tokens for r in mine],
                [value(r) for r in mine],
                color=colors[mode],
                marker=MARKERS.get(sp, "."),
                alpha=1 / sp**0.5,
                label=f"{mode}, sp {sp}",
            )
        axes.set(xscale="log", xlabel="tokens of the window", title=title)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
        ticks = list(dict.fromkeys(r.window_tokens for r in results))
        axes.set_xticks(ticks, [f"{tick // 1024}K" for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    save_figure(figure, path)


def _time(result: GrowthResult) -> float:
    return result.time_ratio


def _memory(result: GrowthResult) -> float:
    return result.peak_bytes / MIB
