"""A window's mask, coarse-grained: how much of each block of (queries x keys) is visible.

Counted from the number of tokens that each attention group has in each block, never from an L x L
array: with ``c[a, g]`` tokens of group g in block a, the visible pairs of query block a and an
earlier key block b are ``sum_g c[a, g] * c[b, g]``, and ``sum_g c (c + 1) / 2`` inside block a.
A 128K window takes milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..modes import PADDING, Mode, attention_groups

_GROUPS_AT_A_TIME = 2048


@dataclass(frozen=True, eq=False)
class MaskGrid:
    """n blocks of tokens against themselves.

    ``edges`` int64 (n + 1,): block a holds the tokens ``edges[a] .. edges[a + 1] - 1``.
    ``pairs`` int64 (n, n): visible pairs of query block a and key block b.
    """

    edges: np.ndarray
    pairs: np.ndarray

    @property
    def fraction(self) -> np.ndarray:
        """float64 (n, n): the visible share of the pairs that causality allows; 0 above them."""
        sizes = np.diff(self.edges)
        allowed = np.tril(np.outer(sizes, sizes), -1) + np.diag(sizes * (sizes + 1) // 2)
        return np.divide(self.pairs, allowed, out=np.zeros(allowed.shape), where=allowed > 0)


def mask_grid(mode: Mode, doc_ids: np.ndarray, num_blocks: int) -> MaskGrid:
    """Coarse-grain the mask of a window.

    Args:
        mode: who sees whom.
        doc_ids: int (L,) the document of each token, ``PADDING`` for none.
        num_blocks: at most this many equal blocks; with L or more, each token is a block. Under a
            mode with an anchor, token 0 is cut off as a block of its own, so that it stays visible.
    """
    groups = attention_groups(mode, np.asarray(doc_ids))
    edges = _block_edges(len(groups), num_blocks, separate_first=mode.anchor)
    sizes = np.diff(edges)
    block = np.repeat(np.arange(len(sizes)), sizes)
    real = groups != PADDING
    pairs = _pairs(groups[real], block[real], len(sizes))
    if mode.anchor and real.any():
        others = real & (groups != groups[real][0])
        pairs[:, 0] += np.bincount(block[others], minlength=len(sizes))
    return MaskGrid(edges, pairs)


def _block_edges(length: int, num_blocks: int, separate_first: bool) -> np.ndarray:
    if length <= num_blocks:
        return np.arange(length + 1, dtype=np.int64)
    first = int(separate_first)
    rest = np.linspace(first, length, max(num_blocks - first, 1) + 1)
    return np.r_[np.zeros(first, dtype=np.int64), np.rint(rest).astype(np.int64)]


def _pairs(groups: np.ndarray, block: np.ndarray, num_blocks: int) -> np.ndarray:
    """int64 (n, n) visible pairs within groups; tokens are given in order."""
    names, group = np.unique(groups, return_inverse=True)
    cell, tokens = np.unique(group * num_blocks + block, return_counts=True)
    cell_group, cell_block = np.divmod(cell, num_blocks)
    pairs = np.zeros((num_blocks, num_blocks))
    # Only groups that reach over several blocks meet another block; the others are on the diagonal.
    wide = np.flatnonzero(np.bincount(cell_group, minlength=len(names)) > 1)
    for first in range(0, len(wide), _GROUPS_AT_A_TIME):
        some = wide[first : first + _GROUPS_AT_A_TIME]
        at = np.isin(cell_group, some)
        counts = np.zeros((num_blocks, len(some)))
        counts[cell_block[at], np.searchsorted(some, cell_group[at])] = tokens[at]
        pairs += counts @ counts.T
    pairs = np.tril(pairs, -1)
    own = np.bincount(cell_block, weights=tokens * (tokens + 1) / 2, minlength=num_blocks)
    np.fill_diagonal(pairs, own)
    return np.rint(pairs).astype(np.int64)
