"""What each rank computes and exchanges, counted from stretches of documents; and its least.

Every rank receives each key row it needs once, from its owner: the minimum, which ``gather`` moves.
"""

from __future__ import annotations

import numpy as np

from .cost import CostModel
from .pieces import Pieces


def rank_loads(
    document: np.ndarray, start: np.ndarray, stop: np.ndarray, rank: np.ndarray, sp_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pairs, key rows and peers of every rank, each (P,).

    Args:
        document, start, stop, rank: (n,) tokens ``start .. stop-1`` of a document, counted within
            it, are held by a rank.

    Returns:
        Visible pairs computed; the larger of the rows received and sent; likewise for the ranks
        exchanged with.
    """
    size = stop - start
    pairs = np.bincount(rank, weights=size * (start + stop + 1) / 2, minlength=sp_size)
    # Only documents on several ranks move rows.
    low = np.full(int(document.max(initial=0)) + 1, sp_size)
    high = np.full(len(low), -1)
    np.minimum.at(low, document, rank)
    np.maximum.at(high, document, rank)
    shared = low[document] < high[document]
    document, start, rank, size = document[shared], start[shared], rank[shared], size[shared]
    _, document = np.unique(document, return_inverse=True)
    last = np.full((sp_size, int(document.max(initial=-1)) + 1), -1, dtype=np.int64)
    np.maximum.at(last, (rank, document), start)
    need = last[:, document] > start
    need[rank, np.arange(len(rank))] = False
    received = need @ size
    sent = np.bincount(rank, weights=need.sum(axis=0) * size, minlength=sp_size)
    owner = np.zeros((len(rank), sp_size), dtype=np.float32)
    owner[np.arange(len(rank)), rank] = 1
    linked = need.astype(np.float32) @ owner > 0
    peers = np.maximum(linked.sum(axis=0), linked.sum(axis=1))
    return pairs, np.maximum(received, sent), peers


def piece_loads(pieces: Pieces, sp_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """:func:`rank_loads` of a micro-batch's pieces."""
    size = pieces.size
    order = np.argsort(pieces.group, kind="stable")
    before = np.cumsum(size[order]) - size[order]
    group = pieces.group[order]
    first = np.r_[True, group[1:] != group[:-1]]
    start = np.empty_like(size)
    start[order] = before - np.maximum.accumulate(np.where(first, before, 0))
    return rank_loads(pieces.group, start, start + size, pieces.owner, sp_size)


def least_seconds(lengths: np.ndarray, local_length: int, sp_size: int, cost: CostModel) -> float:
    """A lower bound of the modelled step time under any layout of S = ``local_length`` rows a rank.

    Two things no layout escapes; the bound is the larger.

    *The mean.* The slowest rank takes at least the mean time: all linear work, the mean attention
    work, and of the mean travel the part that never hides. A document of n > S tokens lies on k >=
    ceil(n / S) ranks. List them by the last of its tokens that each holds, token number l_i, and
    let them hold h_i <= S of its tokens. Rank i receives l_i - h_i rows, and l_i >= h_1 + .. + h_i,
    because the ranks up to i hold nothing behind l_i. With sum h_i = n and l_k = n the rows are at
    least ``sum_{i<k} (n - (k - i) S) = (k - 1) n - S k (k - 1) / 2``.

    *The longest document.* Whoever holds its last token holds at most S of its n tokens and
    receives n - S rows from at least ceil(n / S) - 1 ranks. Travel hides behind attention at most
    as long as attention takes, so the rank's time is at least linear work + travel.
    """
    n = np.asarray(lengths, dtype=np.float64)
    linear = local_length * cost.seconds_per_token
    attention = float((n * (n + 1) / 2).sum()) / sp_size * cost.seconds_per_pair
    k = np.ceil(n / local_length)
    rows = ((k - 1) * n - local_length * k * (k - 1) / 2).sum() / sp_size
    never_hidden = (1 - cost.hideable) * float(cost.travel_seconds(rows, 0))
    longest = float(cost.travel_seconds(max(n.max() - local_length, 0), k.max() - 1))
    return linear + max(attention + never_hidden, longest)
