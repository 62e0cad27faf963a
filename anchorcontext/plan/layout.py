"""Layouts: which tokens of a window each rank of the SP group holds.

``contiguous`` and ``zigzag`` look at the window's length alone; ``balanced`` at its documents
(:mod:`.balanced`). All of them give runs (:mod:`.runs`) in which every rank holds the same number
of tokens.
"""

from __future__ import annotations

import difflib
import logging

import numpy as np

from ..errors import UserError
from ..window import Window
from .balanced import balanced
from .cost import CostModel
from .runs import join_runs

LAYOUTS = ("contiguous", "zigzag", "balanced")

_logger = logging.getLogger(__name__)
_told: set[str] = set()


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
    return join_runs(runs)


def resolve_layout(layout: str, window: Window, num_teams: int) -> str:
    """The layout that a window gets under the name a user gave.

    ``auto`` is ``balanced``; and where every token sees all before it, ``balanced`` is ``zigzag``,
    which then divides the work evenly and moves what any even layout must. Logged once. With one
    team there is nothing to lay out.

    Raises:
        UserError: there is no layout of that name.
    """
    if layout != "auto" and layout not in LAYOUTS:
        near = difflib.get_close_matches(layout, LAYOUTS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"layout {layout!r}: must be one of auto, {', '.join(LAYOUTS)}{hint}")
    if num_teams == 1:
        return "contiguous"
    if layout not in ("auto", "balanced"):
        return layout
    mode = window.mode
    if not mode.same_document:
        _tell(f"layout {layout}: zigzag in mode {mode.name}, where every token sees all before it")
        return "zigzag"
    if layout == "auto":
        _tell(f"layout auto: balanced in mode {mode.name}, where tokens see their own document")
    return "balanced"


def padded_length(length: int, layout: str, sp_size: int, num_teams: int | None = None) -> int:
    """The smallest length >= ``length`` that the layout can divide among ``sp_size`` ranks.

    ``num_teams``: of ranks that swap heads and attend as one; default: every rank by itself.
    """
    teams = sp_size if num_teams is None else num_teams
    multiple = sp_size * (2 if layout == "zigzag" and teams > 1 else 1)
    return -(-length // multiple) * multiple


def layout_runs(
    layout: str, window: Window, padded_length: int, sp_size: int, cost: CostModel | None = None
) -> np.ndarray:
    """A resolved layout's runs, int64 (n, 3), for a window padded to ``padded_length`` tokens."""
    if layout == "contiguous":
        return contiguous(padded_length, sp_size)
    if layout == "zigzag":
        return zigzag(padded_length, sp_size)
    assert layout == "balanced", layout
    return balanced(window, padded_length, sp_size, cost or CostModel())


def _tell(message: str) -> None:
    if message not in _told:
        _told.add(message)
        _logger.info(message)
