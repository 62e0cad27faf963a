"""Random numbers that are functions of what they are for, not of when they are drawn.

A number belongs to (seed, purpose, keys): the same for any order of drawing, any number of workers
and any version of NumPy, whose generators may change their streams. SplitMix64 (Steele, Lea, Flood,
OOPSLA 2014) mixes the keys, one after the other.
"""

from __future__ import annotations

import hashlib

import numpy as np

_UNIT = 2.0**-53


def draw(seed: int, purpose: str, *keys: np.ndarray | int) -> np.ndarray:
    """uint64, one for each element of the broadcast ``keys`` (non-negative integers)."""
    name = hashlib.blake2b(purpose.encode(), digest_size=8).digest()
    state = splitmix64(np.array([seed % (1 << 64)], dtype=np.uint64))
    for key in (np.frombuffer(name, dtype="<u8"), *keys):
        state = splitmix64(state + np.asarray(key).astype(np.uint64))
    return state


def uniform(seed: int, purpose: str, *keys: np.ndarray | int) -> np.ndarray:
    """float64 in [0, 1), as :func:`draw`."""
    return (draw(seed, purpose, *keys) >> np.uint64(11)).astype(np.float64) * _UNIT


def splitmix64(x: np.ndarray) -> np.ndarray:
    """One step of SplitMix64 on uint64, a bijection of them."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
