"""The layout ``balanced``: documents whole where they fit, equal tokens and equal work.

Documents are dealt to ranks in a few ways (:mod:`.deal`) that trade balance for travel; the least
modelled step time (:mod:`.cost`) decides, and the ranks of that layout are evened out by trades
(:mod:`.trades`). Everything is integers and IEEE double arithmetic in a fixed order: equal inputs
give equal layouts on every rank.
"""

from __future__ import annotations

import numpy as np

from ..window import Window
from .cost import CostModel
from .deal import WAYS, Dealer
from .runs import join_runs
from .trades import trade_tokens
from .traffic import least_seconds, rank_loads

GOOD = 1.005
"""No other way is tried when the modelled time is this close to its lower bound."""
GOAL = 1.001
"""Nor are tokens traded when it is this close."""


def balanced(window: Window, padded_length: int, sp_size: int, cost: CostModel) -> np.ndarray:
    """The runs of the layout, int64 (n, 3), for a window padded to ``padded_length`` tokens."""
    if sp_size == 1:
        return np.array([[0, padded_length, 0]], dtype=np.int64)
    _, document = np.unique(window.segment_docs, return_inverse=True)
    lengths = np.bincount(document, weights=np.diff(window.cu_seqlens)).astype(np.int64)
    cuts = balance_documents(lengths, padded_length // sp_size, sp_size, cost)
    return _runs(cuts, window, document, lengths, padded_length)


def balance_documents(
    lengths: np.ndarray, local_length: int, sp_size: int, cost: CostModel
) -> np.ndarray:
    """Cut documents of ``lengths`` (n,) among ranks of ``local_length`` rows.

    Returns:
        int64 (4, m) as in :class:`~anchorcontext.plan.deal.Cuts`; what the documents leave free is
        document n, the padding.
    """
    least = least_seconds(lengths, local_length, sp_size, cost)
    best, best_seconds = None, np.inf
    for way in WAYS:
        cuts = Dealer(lengths, local_length, sp_size, cost, least).deal(way)
        if cuts is None:
            continue
        held = cuts[:, cuts[0] < len(lengths)]
        seconds = rank_loads(held, sp_size).seconds(local_length, cost).max()
        if seconds < best_seconds:
            best, best_seconds = cuts, seconds
        if seconds <= GOOD * least:
            break
    assert best is not None
    padding = best[0] == len(lengths)
    traded = trade_tokens(best[:, ~padding], local_length, sp_size, cost, GOAL * least)
    return np.concatenate([traded, best[:, padding]], axis=1)


def _runs(
    cuts: np.ndarray,
    window: Window,
    segment_document: np.ndarray,
    lengths: np.ndarray,
    padded_length: int,
) -> np.ndarray:
    """From stretches of documents to runs of tokens: a document may lie in several segments."""
    edges = window.cu_seqlens
    order = np.argsort(segment_document, kind="stable")
    # All documents one behind the other, each in token order, the padding last.
    token = np.r_[edges[:-1][order], window.num_tokens]
    size = np.r_[np.diff(edges)[order], padded_length - window.num_tokens]
    place = np.cumsum(size) - size
    document, start, _, rank = cuts
    begin = start + np.r_[0, np.cumsum(lengths)][document]
    by_place = np.argsort(begin)
    begin, rank = begin[by_place], rank[by_place]
    cut = np.unique(np.r_[begin, place[size > 0]])
    segment = np.searchsorted(place, cut, side="right") - 1
    first = token[segment] + cut - place[segment]
    runs = np.stack(
        [
            first,
            first + np.diff(np.r_[cut, padded_length]),
            rank[np.searchsorted(begin, cut, side="right") - 1],
        ],
        axis=1,
    ).astype(np.int64)
    return join_runs(runs[np.lexsort((runs[:, 0], runs[:, 2]))])
