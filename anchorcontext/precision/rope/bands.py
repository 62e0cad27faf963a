"""Bands of RoPE's frequencies: which there are, how much of the scores each carries, and how its q
and k lie in their pairs of dimensions.

A frequency whose wavelength is much longer than the text hardly turns near position 0. If less is
rounded there than far out (:func:`~.parts.split_bands`), that can have two reasons, which
:func:`turned` tells apart:

* cosines and sines are 1 and almost 0, and to a format the same for all positions;
* q and k lie along one dimension of the pair. Not turned, the large number stays on its grid; far
  out it is spread over both dimensions and rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from .stages import Heads

NUM_BANDS = 4
EIGHTH = math.pi / 4

Band = tuple[int, ...]
"""Indices into ``inv_freq``."""


def bands_of(inv_freq: torch.Tensor) -> list[Band]:
    """Equal groups of frequencies, the fastest first: :data:`NUM_BANDS`, or one for each frequency
    if there are fewer."""
    order = inv_freq.argsort(descending=True, stable=True)
    return [tuple(b.tolist()) for b in order.tensor_split(min(NUM_BANDS, len(order)))]


def wavelengths(inv_freq: torch.Tensor, bands: Sequence[Band]) -> np.ndarray:
    """(bands, 2): the shortest and the longest wavelength, in tokens."""
    lengths = (2 * math.pi / inv_freq.double()).numpy()
    return np.array([[lengths[list(b)].min(), lengths[list(b)].max()] for b in bands])


def energy_shares(heads: Heads, bands: Sequence[Band], only: Sequence[int]) -> np.ndarray:
    """(bands,): each band's share of the scores' energy, rms(|q|) rms(|k|) in its dimensions, over
    the query heads ``only``. No rotation changes it."""
    energy = np.zeros(len(bands))
    for head in only:
        query, key = (_pair_energy(x).sum(0) for x in _query_key(heads, head))
        for number, band in enumerate(bands):
            energy[number] += float((query[list(band)].sum() * key[list(band)].sum()).sqrt())
    shares: np.ndarray = energy / energy.sum()
    return shares


def one_sided(heads: Heads, bands: Sequence[Band], only: Sequence[int]) -> np.ndarray:
    """(bands,): the share of |q|^2 and |k|^2 that lies in the larger dimension of each pair, mean
    of q and k over the query heads ``only``. 1: along one; 1/2: in both alike, or nothing there."""
    shares = np.zeros((2 * len(only), len(bands)))
    for row, x in enumerate(x for head in only for x in _query_key(heads, head)):
        energy = _pair_energy(x)
        for number, band in enumerate(bands):
            inside = energy[:, list(band)]
            whole = float(inside.sum())
            shares[row, number] = float(inside.amax(0).sum()) / whole if whole else 0.5
    mean: np.ndarray = shares.mean(0)
    return mean


def turned(heads: Heads, radians: float = EIGHTH) -> Heads:
    """q and k with every pair turned by an angle, an eighth of a turn.

    RoPE turns pairs as well, so scores stay what they were at every position, but in rounding.
    """
    cos, sin = math.cos(radians), math.sin(radians)

    def turn(x: torch.Tensor) -> torch.Tensor:
        first, second, rest = _pairs(x, heads)
        return torch.cat((first * cos - second * sin, first * sin + second * cos, rest), dim=-1)

    return replace(heads, query=turn(heads.query), key=turn(heads.key))


def _query_key(heads: Heads, head: int) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """Both dimensions of every pair (T, R / 2), of q and of k."""
    query, key = heads.query[head], heads.key[heads.key_head(head)]
    return _pairs(query, heads)[:2], _pairs(key, heads)[:2]


def _pairs(x: torch.Tensor, heads: Heads) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """First and second dimensions (..., R / 2) of all pairs, and those that RoPE leaves alone."""
    count = len(heads.inv_freq)
    return x[..., :count], x[..., count : 2 * count], x[..., 2 * count :]


def _pair_energy(pairs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """(2, R / 2): the sum of squares over tokens."""
    return torch.stack([x.square().sum(0) for x in pairs])
