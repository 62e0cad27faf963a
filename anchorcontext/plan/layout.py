"""Layouts: which tokens of a window each rank of the SP group holds.

A layout is a list of *runs*, int64 (n, 3) with columns ``start, stop, rank``: the rank holds tokens
``start .. stop-1`` of the padded window. Runs are listed rank by rank, in the order of the rank's
local rows, and every rank holds the same number of tokens.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

import numpy as np

from ..errors import UserError

RUN_COLUMNS = ("start", "stop", "rank")


def contiguous(padded_length: int, sp_size: int) -> np.ndarray:
    """Rank r holds the r-th of ``sp_size`` equal chunks."""
    chunk = padded_length // sp_size
    ranks = np.arange(sp_size)
    return np.stack([ranks * chunk, (ranks + 1) * chunk, ranks], axis=1).astype(np.int64)


def zigzag(padded_length: int, sp_size: int) -> np.ndarray:
    """Rank r holds chunks r and 2P-1-r of 2P: equal work under a causal mask over the window."""
    if sp_size == 1:
        return contiguous(padded_length, 1)
    chunk = padded_length // (2 * sp_size)
    ranks = np.repeat(np.arange(sp_size), 2)
    chunks = np.stack([np.arange(sp_size), 2 * sp_size - 1 - np.arange(sp_size)], axis=1).ravel()
    runs = np.stack([chunks * chunk, (chunks + 1) * chunk, ranks], axis=1).astype(np.int64)
    return _join(runs)


LAYOUTS: dict[str, Callable[[int, int], np.ndarray]] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
}

_CHUNKS_PER_RANK = {"contiguous": 1, "zigzag": 2}


def check_layout(layout: str) -> None:
    """Raises UserError when there is no layout of that name."""
    if layout not in LAYOUTS:
        near = difflib.get_close_matches(layout, LAYOUTS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"layout {layout!r}: must be one of {', '.join(LAYOUTS)}{hint}")


def padded_length(length: int, layout: str, sp_size: int) -> int:
    """The smallest length >= ``length`` that the layout can divide among ``sp_size`` ranks."""
    check_layout(layout)
    multiple = sp_size * (_CHUNKS_PER_RANK[layout] if sp_size > 1 else 1)
    return -(-length // multiple) * multiple


def layout_runs(layout: str, padded_length: int, sp_size: int) -> np.ndarray:
    """The layout's runs, int64 (n, 3), for a window of ``padded_length`` tokens."""
    check_layout(layout)
    return LAYOUTS[layout](padded_length, sp_size)


def merge_ranks(runs: np.ndarray, size: int) -> np.ndarray:
    """The runs of teams of ``size`` neighbouring ranks, each team's in token order."""
    if size == 1:
        return runs
    team = runs[:, 2] // size
    order = np.lexsort((runs[:, 0], team))
    return _join(np.stack([runs[order, 0], runs[order, 1], team[order]], axis=1))


def local_indices(runs: np.ndarray, rank: int) -> np.ndarray:
    """The tokens that ``rank`` holds, int64 (S,), in the order of its local rows."""
    mine = runs[runs[:, 2] == rank]
    parts = [np.arange(start, stop, dtype=np.int64) for start, stop, _ in mine]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _join(runs: np.ndarray) -> np.ndarray:
    """Join neighbouring runs of one rank that touch (zigzag's middle chunks do)."""
    touch = (runs[1:, 2] == runs[:-1, 2]) & (runs[1:, 0] == runs[:-1, 1])
    first = np.r_[True, ~touch]
    last = np.r_[~touch, True]
    return np.stack([runs[first, 0], runs[last, 1], runs[first, 2]], axis=1)
