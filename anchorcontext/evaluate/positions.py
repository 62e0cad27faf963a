"""Loss by position: how well a token is predicted, by how many tokens stand before it.

A document of L tokens, BOS included, is read alone. The *position* of a target is the number of
tokens before it, and one causal pass gives the loss at every position: at position p it is that of
a context of p tokens. Alone behind its BOS a document is computed alike in every mode, so there is
none to choose.

What the far context is worth is the difference of two losses *of the same targets*: with everything
before them, and with the last S tokens only. For the second, the document is read again in excerpts
of S tokens, BOS included, half of them new: each target sees between S/2 and S - 1 tokens. Excerpts
are packed side by side, so this costs two passes of short documents.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..errors import UserError
from .probes import NOT_COUNTED, Excerpt, Probe, packed_alone
from .tally import Tally

FIRST_EDGE = 1024


@dataclass(frozen=True)
class PositionBucket:
    """The targets at positions ``start`` to ``stop - 1`` of all documents."""

    start: int
    stop: int
    targets: int
    loss: float | None
    """Nats a target, with everything before it; None without targets."""
    perplexity: float | None
    short_loss: float | None = None
    """Of the same targets, with the last tokens only; None where that is everything."""
    gain: float | None = None
    """``loss - short_loss``: negative where the far context helps."""


def position_edges(length: int, first: int = FIRST_EDGE) -> list[int]:
    """0, ``first``, its doublings, and ``length``: the ends of the ranges of positions."""
    edges = [0]
    step = first
    while step < length:
        edges.append(step)
        step *= 2
    return [*edges, length]


def position_probes(
    documents: Sequence[np.ndarray], edges: Sequence[int], bos: int | None
) -> list[Probe]:
    """Each document, cut to ``edges[-1]`` tokens with BOS, in a window of its own; group g holds
    the positions from ``edges[g]`` on."""
    excerpts = [_excerpt(ids, 0, edges) for ids in _with_bos(documents, edges[-1], bos)]
    return packed_alone(excerpts, edges[-1])


def short_probes(
    documents: Sequence[np.ndarray], edges: Sequence[int], bos: int | None, context: int
) -> list[Probe]:
    """The targets at positions from ``context`` on, in excerpts of ``context`` tokens, packed into
    windows of ``edges[-1]``; groups as of :func:`position_probes`."""
    excerpts = [
        excerpt
        for ids in _with_bos(documents, edges[-1], bos)
        for excerpt in _short_excerpts(ids, edges, bos, context)
    ]
    return packed_alone(excerpts, edges[-1])


def position_buckets(
    edges: Sequence[int], found: Tally, short: Tally | None = None, context: int | None = None
) -> list[PositionBucket]:
    """The table from both tallies; a range that begins before ``context`` has no gain."""
    buckets = []
    for group, (start, stop) in enumerate(pairwise(edges)):
        here = slice(group, group + 1)
        loss = found.mean_loss(here)
        beyond = short is not None and context is not None and start >= context
        short_loss = short.mean_loss(here) if short is not None and beyond else None
        if short is not None and short_loss is not None:
            assert short.targets[group] == found.targets[group], "the same targets"
        buckets.append(
            PositionBucket(
                start=start,
                stop=stop,
                targets=int(found.targets[group]),
                loss=loss,
                perplexity=None if loss is None else math.exp(min(loss, 700.0)),
                short_loss=short_loss,
                gain=None if loss is None or short_loss is None else loss - short_loss,
            )
        )
    return buckets


def total_gain(buckets: Sequence[PositionBucket]) -> float | None:
    """The gain over all targets that have one; None without any."""
    rows = [(b.targets, b.gain) for b in buckets if b.gain is not None]
    targets = sum(count for count, _ in rows)
    return sum(count * gain for count, gain in rows) / targets if targets else None


def check_context(context: int, edges: Sequence[int]) -> None:
    """Refuse a short context that is none, or that divides a range of positions.

    Raises:
        UserError: says which values do.
    """
    inner, length = edges[1:-1], edges[-1]
    if not inner:
        raise UserError(
            f"--short {context}: the {length:,} positions are one range, beyond which nothing is "
            f"left to compare; leave it out, or ask for more than {FIRST_EDGE:,} tokens"
        )
    if context not in inner or context < 4:
        raise UserError(
            f"--short {context}: must be where one range of positions ends and the next begins, "
            f"in {length:,} tokens one of {', '.join(map(str, inner))}"
        )


def _with_bos(
    documents: Sequence[np.ndarray], length: int, bos: int | None
) -> Iterator[np.ndarray]:
    front = [] if bos is None else [bos]
    for ids in documents:
        yield np.r_[front, ids].astype(np.int64)[:length]


def _excerpt(ids: np.ndarray, start: int, edges: Sequence[int]) -> Excerpt:
    """Tokens whose first one stands at position ``start`` of its document."""
    positions = start + np.arange(len(ids))
    groups = np.searchsorted(np.asarray(edges), positions, side="right") - 1
    groups[:1] = NOT_COUNTED
    return Excerpt(ids, groups)


def _short_excerpts(
    ids: np.ndarray, edges: Sequence[int], bos: int | None, context: int
) -> Iterator[Excerpt]:
    front = 0 if bos is None else 1
    for first in range(context, len(ids), context // 2):
        stop = min(first + context // 2, len(ids))
        begin = stop - context + front
        whole = _excerpt(ids[begin:stop], begin, edges)
        groups = np.where(np.arange(begin, stop) < first, NOT_COUNTED, whole.groups)
        yield Excerpt(np.r_[ids[:front], whole.ids], np.r_[np.full(front, NOT_COUNTED), groups])
