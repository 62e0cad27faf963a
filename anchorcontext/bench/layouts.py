"""Layouts on named length mixes: modelled step time over its lower bound, balance and travel."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..environment import measured_on
from ..markdown import markdown_table
from ..plan.baselines import document_zigzag, min_heap_chunks
from ..plan.cost import CostModel
from ..plan.layout import layout_runs
from ..plan.mixes import mix_lengths
from ..plan.pieces import make_pieces
from ..plan.traffic import least_seconds, piece_loads
from ..window import Window
from ..words import counted

MIXES = {
    "64K short documents": ("short", 65536),
    "128K mixed": ("upsampled", 131072),
    "one 96K document + short ones": ("one_long", 131072),
}
SP_SIZES = (4, 8, 16, 64)
LINKS = {"InfiniBand, 50 GB/s a device": 50e9, "NVLink, 450 GB/s a device": 450e9}
LAYOUTS = ("contiguous", "zigzag", "per-document zigzag", "min-heap chunks", "balanced")


@dataclass(frozen=True)
class LayoutResult:
    """One layout of one window on P ranks."""

    link: str
    mix: str
    documents: int
    sp_size: int
    layout: str
    over_bound: float
    """Modelled step time over the lower bound that no layout beats."""
    step_seconds: float
    """Modelled: one layer, forward and backward."""
    balance: float
    """The busiest rank's visible pairs over the mean."""
    rows_moved: float
    """Key rows received by all ranks in one forward, in windows."""
    most_rows: float
    """Key rows that the busiest link moves, in windows."""
    layout_ms: float
    """Measured processor time to make the layout, the least of the repeats."""


def bench_layouts(seed: int = 0) -> list[LayoutResult]:
    """Every layout on every mix, rank count and link."""
    return [
        measure_layout(layout, mix, sp_size, link, seed, repeats=3)
        for link in LINKS
        for mix in MIXES
        for sp_size in SP_SIZES
        for layout in LAYOUTS
    ]


def measure_layout(
    layout: str, mix: str, sp_size: int, link: str, seed: int = 0, repeats: int = 1
) -> LayoutResult:
    """One of ``LAYOUTS`` on one of ``MIXES`` (its window number ``seed``) over one of ``LINKS``."""
    name, length = MIXES[mix]
    lengths = mix_lengths(name, length, seed)
    window = Window(np.zeros(length, dtype=np.int64), np.r_[0, np.cumsum(lengths)], "intra_doc")
    cost = CostModel(bytes_per_second=LINKS[link])
    make = _maker(layout, cost)
    layout_ms = float("inf")
    for _ in range(repeats):
        began = time.process_time()
        runs = make(window, length, sp_size)
        layout_ms = min(layout_ms, 1e3 * (time.process_time() - began))
    loads = piece_loads(make_pieces([window], [runs], length), sp_size)
    seconds = float(loads.seconds(length // sp_size, cost).max())
    return LayoutResult(
        link=link,
        mix=mix,
        documents=len(lengths),
        sp_size=sp_size,
        layout=layout,
        over_bound=seconds / least_seconds(lengths, length // sp_size, sp_size, cost),
        step_seconds=seconds,
        balance=float(loads.pairs.max() / loads.pairs.mean()),
        rows_moved=float(loads.received.sum() / length),
        most_rows=float(loads.rows.max() / length),
        layout_ms=layout_ms,
    )


def layouts_markdown(results: Iterable[LayoutResult]) -> str:
    """The section of the page."""
    results = list(results)
    parts = [
        "## Layouts\n\n"
        "Written by `anchorcontext bench layouts --markdown docs/benchmarks.md`. Modelled, not "
        "measured: the step time of one layer of an 8B model on H100s (`plan/cost.py`) over a "
        "lower bound that no layout beats (`plan/traffic.py`); 1 is perfect. Key rows travel as "
        "`gather` moves them. The windows are drawn from named length mixes (`plan/mixes.py`)."
    ]
    for link in dict.fromkeys(result.link for result in results):
        parts.append(f"### {link}: step time over its lower bound")
        parts.append(_table(results, link, lambda result: f"{result.over_bound:.3f}"))
    first = results[0].link
    parts.append(f"### {first}: busiest rank's attention over the mean")
    parts.append(_table(results, first, lambda result: f"{result.balance:.2f}"))
    parts.append(f"### {first}: key rows over the busiest link, forward, in windows")
    parts.append(_table(results, first, lambda result: f"{result.most_rows:.3f}"))
    last = results[-1].link
    parts.append(
        f"### {last}: milliseconds to make the layout\n\nMeasured: processor time on one core "
        f"({measured_on()}), the least of three."
    )
    parts.append(_table(results, last, lambda result: f"{result.layout_ms:.1f}"))
    return "\n\n".join(parts)


def _table(results: list[LayoutResult], link: str, cell: Callable[[LayoutResult], str]) -> str:
    chosen = [result for result in results if result.link == link]
    cells = {(r.mix, r.documents, r.sp_size, r.layout): cell(r) for r in chosen}
    keys = dict.fromkeys(key[:3] for key in cells)
    rows = [
        (
            f"{mix} ({counted(documents, 'document')})",
            sp_size,
            *(cells[mix, documents, sp_size, layout] for layout in LAYOUTS),
        )
        for mix, documents, sp_size in keys
    ]
    return markdown_table(("window", "ranks", *LAYOUTS), rows)


def _maker(layout: str, cost: CostModel) -> Callable[[Window, int, int], np.ndarray]:
    if layout == "per-document zigzag":
        return document_zigzag
    if layout == "min-heap chunks":
        return min_heap_chunks
    return partial(_named_layout, layout, cost)


def _named_layout(
    layout: str, cost: CostModel, window: Window, padded_length: int, sp_size: int
) -> np.ndarray:
    return layout_runs(layout, window, padded_length, sp_size, cost)
