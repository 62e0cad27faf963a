"""Which documents are kept, and for what: shares of the sources, held-out documents, their order.

All of it is decided by the documents' contents, lengths and a seed, not by files or workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import UserError
from .draws import draw


def keep_shares(
    lengths: np.ndarray,
    sources: np.ndarray,
    names: Sequence[str],
    shares: Mapping[str, float],
    hashes: np.ndarray,
    seed: int,
) -> np.ndarray:
    """Which documents to keep so that the kept tokens have the given shares, bool (D,).

    As many tokens as possible are kept: all of the source that is scarcest for its share, of the
    others documents in a random order up to their share, to within half a document. Of a text that
    is there several times within a share, the first is taken with all other texts, the second in a
    second round: a scarce corpus that is listed k times is repeated evenly.

    Args:
        lengths, sources, hashes: (D,) as of :class:`~.tokens.TokenisedCorpus`.
        names: the sources' names.
        shares: weights, not all zero, by name; ``web`` stands for ``web`` and all of ``web/...``.

    Raises:
        UserError: a source belongs to no share or to several, or a share has no documents.
    """
    groups = _groups(names, list(shares))[sources]
    weights = np.array(list(shares.values()), dtype=np.float64)
    totals = np.bincount(groups, lengths, len(shares))
    for name, total in zip(shares, totals, strict=True):
        if total == 0:
            raise UserError(
                f"data.shares.{name}: the corpus has no tokens of this source, but of "
                f"{', '.join(names)}; leave it out, or mend data.sources"
            )
    targets = weights * (totals / weights).min()
    order = np.lexsort((draw(seed, "shares", hashes), copy_number(hashes, groups), groups))
    tokens = lengths[order]
    before = np.cumsum(tokens) - tokens
    group = groups[order]
    first = np.searchsorted(group, np.arange(len(shares)))
    before -= before[first][group]
    kept = np.zeros(len(lengths), dtype=bool)
    kept[order] = before + tokens / 2 <= np.ceil(targets)[group]
    return kept


def _groups(names: Sequence[str], keys: Sequence[str]) -> np.ndarray:
    """The share that each source belongs to, by their order."""
    found = []
    for name in names:
        mine = [i for i, key in enumerate(keys) if name == key or name.startswith(f"{key}/")]
        if len(mine) != 1:
            several = " and ".join(keys[i] for i in mine)
            rule = f"belongs to the shares {several}" if mine else "belongs to no share"
            raise UserError(
                f"data.shares: the source {name!r} {rule}; name every source, or the part before "
                "a slash of several, exactly once"
            )
        found += mine
    return np.array(found, dtype=np.int64)


def held_out(hashes: np.ndarray, fraction: float) -> np.ndarray:
    """Which documents are for validation, bool (D,): those whose hash is small.

    A document is on the same side in any order, corpus and tokenizer; equal texts are on one side.
    """
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53 < fraction


def shuffled(hashes: np.ndarray, seed: int) -> np.ndarray:
    """The documents in a random order, int64 (D,); equal ones lie apart."""
    return np.argsort(draw(seed, "documents", hashes, copy_number(hashes)), kind="stable")


def copy_number(hashes: np.ndarray, groups: np.ndarray | int = 0) -> np.ndarray:
    """How many documents of the same hash and group come before each one, int64 (D,)."""
    groups = np.broadcast_to(groups, hashes.shape)
    order = np.lexsort((hashes, groups))  # stable: equal ones stay in their order
    new = (np.diff(hashes[order]) != 0) | (np.diff(groups[order]) != 0)
    place = np.arange(len(order))
    first = np.maximum.accumulate(np.where(np.r_[True, new][: len(order)], place, 0))
    found = np.empty_like(place)
    found[order] = place - first
    return found
