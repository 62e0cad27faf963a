"""Named mixes of document lengths, for benchmarks and for planning without data.

Sources, their shares of the tokens and their median lengths are rounded figures for SlimPajama.
Lengths within a source are log-normal about the median with ``SIGMA`` = 1, an assumption: web text
is close to it (mean / median = 1.65). A window is filled with documents drawn at random, each
source as often as its share of *tokens* asks for; the last document is cut at the window's end.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..errors import UserError

SOURCES = {
    # name: share of the tokens, median tokens a document
    "commoncrawl": (0.5337, 1066),
    "c4": (0.2661, 315),
    "github": (0.0500, 520),
    "arxiv": (0.0429, 14565),
    "books": (0.0415, 121602),
    "wikipedia": (0.0340, 409),
    "stackexchange": (0.0317, 507),
}
SIGMA = 1.0
SHORT_TOKENS = 4096
KEPT_SHORT = 0.1
"""Length upsampling keeps a document under ``SHORT_TOKENS`` with this probability."""
_POOL = 4096


def slimpajama(window_tokens: int, seed: int = 0) -> np.ndarray:
    """Lengths (n,) that fill a window from all sources."""
    return _fill(window_tokens, seed, keep_short=1.0)


def upsampled(window_tokens: int, seed: int = 0) -> np.ndarray:
    """The same with per-source length upsampling, which preserves each source's token share."""
    return _fill(window_tokens, seed, keep_short=KEPT_SHORT)


def short(window_tokens: int, seed: int = 0) -> np.ndarray:
    """Lengths from the sources of short documents, none of ``SHORT_TOKENS`` or more."""
    return _fill(window_tokens, seed, keep_short=1.0, longest=SHORT_TOKENS - 1)


def one_long(window_tokens: int, seed: int = 0) -> np.ndarray:
    """One document of three quarters of the window, and short ones before and behind it."""
    long = window_tokens * 3 // 4
    lengths = short(window_tokens - long, seed)
    place = int(np.random.default_rng([seed, 1]).integers(len(lengths) + 1))
    return np.insert(lengths, place, long)


def documents_of_64(window_tokens: int, seed: int = 0) -> np.ndarray:
    """Lengths of 64, the last one what is left: what an engine pays for a document."""
    full, rest = divmod(window_tokens, 64)
    return np.array([64] * full + [rest] * (rest > 0), dtype=np.int64)


MIXES: dict[str, Callable[[int, int], np.ndarray]] = {
    "slimpajama": slimpajama,
    "upsampled": upsampled,
    "short": short,
    "one_long": one_long,
    "documents_of_64": documents_of_64,
}


def mix_lengths(mix: str, window_tokens: int, seed: int = 0) -> np.ndarray:
    """Document lengths int64 (n,) of a window of ``window_tokens`` tokens.

    Raises:
        UserError: there is no mix of that name.
    """
    if mix not in MIXES:
        raise UserError(f"length mix {mix!r}: must be one of {', '.join(MIXES)}")
    return MIXES[mix](window_tokens, seed)


def _fill(
    window_tokens: int, seed: int, keep_short: float, longest: int | None = None
) -> np.ndarray:
    rng = np.random.default_rng(seed)
    pools, rates = [], []
    for share, median in SOURCES.values():
        pool = np.maximum(1, rng.lognormal(np.log(median), SIGMA, _POOL)).astype(np.int64)
        pool = pool[(pool >= SHORT_TOKENS) | (rng.random(_POOL) < keep_short)]
        if longest is not None:
            pool = pool[pool <= longest]
        if longest is None or median <= longest:
            pools.append(pool)
            rates.append(share / pool.mean())
    chance = np.array(rates) / sum(rates)
    lengths: list[int] = []
    filled = 0
    while filled < window_tokens:
        pool = pools[rng.choice(len(pools), p=chance)]
        lengths.append(min(int(rng.choice(pool)), window_tokens - filled))
        filled += lengths[-1]
    return np.array(lengths, dtype=np.int64)
