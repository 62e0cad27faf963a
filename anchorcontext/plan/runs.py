"""Runs: what a layout is made of.

Runs are int64 (n, 3) with columns ``start, stop, rank``: the rank holds tokens ``start .. stop-1``
of one padded window. They are listed rank by rank, in the order of the rank's local rows; every
token is in one run and every rank holds the same number of tokens.
"""

from __future__ import annotations

import numpy as np


def join_runs(runs: np.ndarray) -> np.ndarray:
    """Join neighbouring runs of one rank that touch."""
    touch = (runs[1:, 2] == runs[:-1, 2]) & (runs[1:, 0] == runs[:-1, 1])
    first = np.r_[True, ~touch]
    last = np.r_[~touch, True]
    return np.stack([runs[first, 0], runs[last, 1], runs[first, 2]], axis=1)


def split_runs(runs: np.ndarray, size: int) -> np.ndarray:
    """The runs of ranks from those of teams of ``size`` neighbouring ranks.

    Each rank takes an equal part of its team's rows, in their order; which one does not matter for
    attention, which runs on the whole team's rows.
    """
    if size == 1:
        return runs
    first = first_rows(runs)
    last = first + runs[:, 1] - runs[:, 0]
    local_length = int(last.max()) // size
    parts = []
    for member in range(size):
        row = member * local_length
        start = runs[:, 0] + np.maximum(row - first, 0)
        stop = runs[:, 1] - np.maximum(last - row - local_length, 0)
        held = start < stop
        parts.append(np.stack([start, stop, runs[:, 2] * size + member], axis=1)[held])
    split = np.concatenate(parts)
    return split[np.argsort(split[:, 2], kind="stable")]


def first_rows(runs: np.ndarray) -> np.ndarray:
    """The first local row of each run on its rank, int64 (n,)."""
    lengths = runs[:, 1] - runs[:, 0]
    before = np.cumsum(lengths) - lengths
    first_of_rank = np.r_[True, runs[1:, 2] != runs[:-1, 2]]
    base = np.maximum.accumulate(np.where(first_of_rank, before, 0))
    return before - base


def local_indices(runs: np.ndarray, rank: int) -> np.ndarray:
    """The tokens that ``rank`` holds, int64 (S,), in the order of its local rows."""
    mine = runs[runs[:, 2] == rank]
    parts = [np.arange(start, stop, dtype=np.int64) for start, stop, _ in mine]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
