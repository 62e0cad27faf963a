"""Packing speed and memory on document lengths alone, against a plain loop over documents."""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np

from ..data.interleave import interleave
from ..data.packing import Packing, pack
from ..environment import measured_on
from ..markdown import markdown_table
from ..words import counted

MEAN_TOKENS = 1000 / 3
"""Three million documents are 1e9 tokens."""
SIGMA = 1.0
PLAIN_LOOP = "plain loop: concat"


@dataclass(frozen=True)
class PackingResult:
    """One way of packing, in a process of its own."""

    way: str
    documents: int
    tokens: int
    seconds: float
    """Of one core."""
    mebibytes: float
    """Memory at its highest, beyond what the lengths and the imports take."""
    windows: int
    utilisation: float
    cut: float
    """Share of the documents that lie in more than one window."""


def bench_packing(
    num_documents: int, window_tokens: int, seed: int = 0
) -> tuple[PackingResult, ...]:
    """Every way on log-normal lengths of ``MEAN_TOKENS`` on average, one after the other."""
    results = []
    for way in WAYS:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context) as pool:  # memory at its highest is a process's own
            results.append(pool.submit(_measure, way, num_documents, window_tokens, seed).result())
    return tuple(results)


def packing_markdown(results: tuple[PackingResult, ...], window_tokens: int, command: str) -> str:
    """The section of the documentation: what was run, and the table."""
    first = results[0]
    rows = [
        (
            result.way,
            f"{result.seconds:.1f}",
            f"{result.seconds / first.seconds:.2f}",
            f"{result.mebibytes:,.0f}",
            f"{result.windows:,}",
            f"{100 * result.utilisation:.3f}",
            f"{100 * result.cut:.3f}",
        )
        for result in results
    ]
    headers = ("", "seconds", "x plain loop", "MiB", "windows", "filled, %", "documents cut, %")
    return (
        f"`{command}`: {counted(first.documents, 'document')} of {first.tokens:,} tokens "
        f"into windows of {window_tokens:,}, on one core ({measured_on()}).\n\n"
        f"{markdown_table(headers, rows)}"
    )


def plain_loop(lengths: np.ndarray, capacity: int) -> list[list[tuple[int, int, int]]]:
    """``concat`` as a script writes it: windows of (document, first token, tokens)."""
    windows: list[list[tuple[int, int, int]]] = [[]]
    room = capacity
    for document, length in enumerate(lengths.tolist()):
        start = 0
        while start < length:
            if room == 0:
                windows.append([])
                room = capacity
            take = min(room, length - start)
            windows[-1].append((document, start, take))
            start, room = start + take, room - take
    return windows


def _loop(lengths: np.ndarray, window_tokens: int) -> tuple[int, float, int]:
    windows = plain_loop(lengths, window_tokens - 1)
    filled = sum(take for window in windows for _, _, take in window) + len(windows)
    cut = len({document for window in windows for document, start, _ in window if start})
    return len(windows), filled / (len(windows) * window_tokens), cut


def _found(packing: Packing) -> tuple[int, float, int]:
    return packing.num_windows, packing.utilisation, packing.num_cut


def _tagged(lengths: np.ndarray, window_tokens: int) -> Packing:
    front = np.full(len(lengths), 8)
    return pack(lengths, window_tokens, anchor=True, first=front, again=front)


def _interleaved(lengths: np.ndarray, window_tokens: int) -> Packing:
    packing = pack(lengths, window_tokens, anchor=True, method="best_fit")
    interleave(packing.segments)
    return packing


WAYS: dict[str, Callable[[np.ndarray, int], tuple[int, float, int]]] = {
    PLAIN_LOOP: _loop,
    "concat": lambda n, size: _found(pack(n, size, anchor=True)),
    "concat behind tags": lambda n, size: _found(_tagged(n, size)),
    "best_fit": lambda n, size: _found(pack(n, size, anchor=True, method="best_fit")),
    "best_fit, max_truncation 0.01": lambda n, size: _found(
        pack(n, size, anchor=True, method="best_fit", max_truncation=0.01)
    ),
    "best_fit, then interleave": lambda n, size: _found(_interleaved(n, size)),
}


def _measure(way: str, num_documents: int, window_tokens: int, seed: int) -> PackingResult:
    rng = np.random.default_rng(seed)
    median = MEAN_TOKENS * np.exp(-(SIGMA**2) / 2)
    lengths = rng.lognormal(np.log(median), SIGMA, num_documents).astype(np.int64) + 1
    WAYS[way](lengths[:100], window_tokens)
    before, start = _highest_memory(), time.process_time()
    windows, utilisation, num_cut = WAYS[way](lengths, window_tokens)
    seconds, memory = time.process_time() - start, _highest_memory() - before
    return PackingResult(
        way=way,
        documents=num_documents,
        tokens=int(lengths.sum()),
        seconds=seconds,
        mebibytes=memory / 1024,
        windows=windows,
        utilisation=utilisation,
        cut=num_cut / num_documents,
    )


def _highest_memory() -> int:
    """KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
