"""Per-source length upsampling: more of the long documents, the same shares of the sources.

The recipe of the AnchorAttention paper (arXiv 2411.13476, after Fu et al., arXiv 2402.10171) keeps
documents under 4,096 tokens with probability 0.1 and each source's share of the tokens. Thinning
alone would break the shares: books are long and stay whole, C4 is short and shrinks to a seventh.
So every source is then reduced, long and short documents alike, to what the one that shrank most
can match. No document is repeated.
"""

from __future__ import annotations

import numpy as np

from .draws import uniform


def upsample(
    lengths: np.ndarray,
    sources: np.ndarray,
    hashes: np.ndarray,
    *,
    below: int = 4096,
    keep: float = 0.1,
    seed: int = 0,
) -> np.ndarray:
    """How many tokens of each document stay, from its first: int64 (D,), 0 for none.

    The kept share of a source's tokens is the same for all sources, to a token each: one document a
    source is cut for that. It is the smallest, over sources, of what thinning is expected to leave.

    Args:
        lengths: (D,) tokens of each document.
        sources: (D,) the source of each document, small integers.
        hashes: (D,) a number of each document, of its content or place; equal ones share their lot.
        below: documents with fewer tokens are short.
        keep: the chance of a short document relative to that of a long one, above 0.
        seed: decides which documents stay.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    totals = np.bincount(sources, lengths)
    weights = np.where(lengths < below, keep, 1.0)
    expected = np.bincount(sources, weights * lengths)
    some = totals > 0
    if not some.any():
        return lengths.copy()
    share = (expected[some] / totals[some]).min()
    targets = np.rint(share * totals).astype(np.int64)
    # Documents in the order of u / weight: those below 1 are exactly what independent coins would
    # keep, and a shorter run of the order thins long and short documents by the same factor.
    priority = uniform(seed, "upsample", hashes) / weights
    order = np.lexsort((priority, sources))
    ordered = lengths[order]
    before = np.cumsum(ordered) - ordered
    first = np.searchsorted(sources[order], np.arange(len(totals)))
    start = before[np.minimum(first, len(order) - 1)]
    before -= start[sources[order]]
    kept = np.empty_like(lengths)
    kept[order] = np.clip(targets[sources[order]] - before, 0, ordered)
    return kept
