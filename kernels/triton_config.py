"""Block sizes of the Triton kernels: a table, and a tuner that picks from it on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

logger = logging.getLogger("anchorcontext")

KERNELS = ("forward", "dq", "dkdv")
CHUNK_ROWS = 512  # rows that one program of `prepare_kernel` goes through


class Config(NamedTuple):
    """Queries and keys of an iteration, warps of a program, stages of its software pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


INTERPRETER = Config(16, 16, 4, 1)
PREPARE = Config(32, 32, 4, 1)  # of the kernels that take no keys
ANCHOR_BACKWARD = Config(16, 16, 4, 1)  # the one of them that holds four tiles

# By kernel and padded head dimension (64 serves all smaller ones); the first is the default, which
# the tests compile ahead of time and refuse when it spills registers at head dimensions to 128.
_Table = dict[tuple[str, int], tuple[Config, ...]]
_HOPPER: _Table = {
    ("forward", 64): (Config(128, 64, 8, 3), Config(128, 128, 8, 2), Config(128, 64, 4, 3)),
    ("forward", 128): (Config(128, 64, 8, 3), Config(128, 64, 8, 2), Config(128, 128, 8, 2)),
    ("forward", 256): (Config(64, 32, 8, 2), Config(128, 32, 8, 2), Config(128, 64, 8, 2)),
    ("dq", 64): (Config(128, 64, 8, 2), Config(128, 64, 8, 3), Config(64, 64, 4, 2)),
    ("dq", 128): (Config(128, 64, 8, 2), Config(64, 64, 4, 2)),
    ("dq", 256): (Config(32, 32, 8, 2), Config(128, 32, 8, 2), Config(64, 32, 8, 1)),
    ("dkdv", 64): (Config(64, 128, 8, 2), Config(64, 64, 4, 2)),
    # The default spills with Triton 3.6, the last one with 3.9: each version has one that does not.
    ("dkdv", 128): (Config(32, 128, 8, 2), Config(64, 128, 8, 2), Config(64, 64, 8, 1)),
    ("dkdv", 256): (Config(32, 32, 8, 2), Config(16, 64, 8, 2), Config(32, 64, 8, 2)),
}
_AMPERE: _Table = {
    ("forward", 64): (Config(128, 64, 8, 3), Config(64, 64, 4, 3), Config(128, 64, 4, 3)),
    ("forward", 128): (Config(128, 64, 8, 3), Config(64, 64, 4, 2), Config(128, 32, 8, 3)),
    ("forward", 256): (Config(64, 32, 8, 2), Config(64, 32, 4, 2)),
    ("dq", 64): (Config(128, 64, 8, 2), Config(64, 64, 4, 2)),
    ("dq", 128): (Config(64, 64, 8, 2), Config(64, 64, 4, 2), Config(64, 32, 4, 2)),
    ("dq", 256): (Config(32, 32, 8, 2), Config(64, 32, 8, 1)),
    ("dkdv", 64): (Config(32, 128, 8, 2), Config(64, 64, 4, 2)),
    ("dkdv", 128): (Config(64, 64, 8, 2), Config(32, 64, 4, 2), Config(32, 128, 8, 2)),
    ("dkdv", 256): (Config(32, 32, 8, 2), Config(16, 64, 8, 2)),
}
# fp32 operands: fp32 inputs, or q and k rotated inside the kernel; on either architecture.
_SINGLE_PRECISION: _Table = {
    ("forward", 64): (Config(32, 32, 8, 1), Config(64, 32, 8, 1), Config(32, 32, 4, 1)),
    ("forward", 128): (Config(32, 32, 8, 1), Config(64, 32, 8, 1)),
    ("forward", 256): (Config(16, 16, 8, 1), Config(32, 16, 8, 1)),
    ("dq", 64): (Config(32, 32, 8, 1), Config(32, 32, 4, 1)),
    ("dq", 128): (Config(32, 16, 8, 1), Config(32, 32, 8, 1)),
    ("dq", 256): (Config(16, 16, 8, 1),),
    ("dkdv", 64): (Config(32, 32, 8, 1), Config(32, 32, 4, 1)),
    ("dkdv", 128): (Config(16, 32, 8, 1), Config(32, 32, 8, 1)),
    ("dkdv", 256): (Config(16, 16, 8, 1),),
}

_tuned: dict[tuple, Config] = {}


def block_columns(head_dim: int) -> int:
    """Columns of a tile: the next power of two, 16 at least (what a tensor-core product takes)."""
    return max(16, 1 << (head_dim - 1).bit_length())


def candidates(
    kernel: str, head_dim: int, dtype: torch.dtype, rope: bool, capability: tuple[int, int]
) -> tuple[Config, ...]:
    """The configurations worth trying on a device of ``capability``, the default first."""
    if rope or dtype == torch.float32:
        table = _SINGLE_PRECISION
    else:
        table = _HOPPER if capability >= (9, 0) else _AMPERE
    return table[kernel, max(64, block_columns(head_dim))]


def tuned(key: tuple, options: tuple[Config, ...], seconds: Callable[[Config], float]) -> Config:
    """The fastest of ``options``, measured by ``seconds`` once per process and ``key``.

    A configuration that the device cannot hold, or the compiler cannot make, is passed over.
    """
    if key not in _tuned:
        timings = {config: _timed(seconds, config) for config in options}
        _tuned[key] = min(options, key=timings.__getitem__)
        logger.info("Triton blocks for %s: %s", key, _tuned[key])
    return _tuned[key]


def _timed(seconds: Callable[[Config], float], config: Config) -> float:
    from triton.runtime.errors import OutOfResources, PTXASError

    try:
        return seconds(config)
    except (OutOfResources, PTXASError) as error:
        logger.debug("Triton blocks %s: %s", config, error)
        return float("inf")
