"""Block sizes of the Triton kernels: a table, and a tuner that picks from it on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

logger = logging.getLogger("anchorcontext")

KERNELS = ("forward", "dq", "dkdv")
# Columns at a time where tiles are not held whole: of an accumulator, and of the factors of a
# product over the head dimension (with RoPE four times as many tiles are loaded for it).
PART_COLUMNS, SINGLE_STEP, ROTATED_STEP = 64, 32, 16
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

# By kernel and padded head dimension (64 serves all smaller ones). The first is the default: it
# spills no registers, with Triton 3.6 and 3.9; `bench kernels-aot` shows it, the tests refuse more.
_Table = dict[tuple[str, int], tuple[Config, ...]]
_HOPPER: _Table = {
    ("forward", 64): (Config(128, 64, 8, 3), Config(128, 128, 8, 2)),
    ("forward", 128): (Config(128, 64, 8, 3), Config(128, 64, 8, 2), Config(128, 128, 8, 2)),
    ("forward", 256): (Config(64, 32, 8, 2), Config(128, 32, 8, 2)),
    ("dq", 64): (Config(128, 64, 8, 2), Config(128, 64, 8, 3), Config(64, 64, 4, 2)),
    ("dq", 128): (Config(128, 64, 8, 2), Config(64, 64, 4, 2)),
    ("dq", 256): (Config(32, 32, 8, 2), Config(32, 64, 8, 1)),
    ("dkdv", 64): (Config(64, 128, 8, 2), Config(64, 64, 4, 2)),
    ("dkdv", 128): (Config(32, 128, 8, 2), Config(64, 128, 8, 2)),
    ("dkdv", 256): (Config(32, 32, 8, 2),),
}
_AMPERE: _Table = {
    ("forward", 64): (Config(128, 64, 8, 3), Config(64, 64, 4, 3)),
    ("forward", 128): (Config(128, 32, 8, 3), Config(128, 64, 8, 3), Config(64, 64, 4, 2)),
    ("forward", 256): (Config(64, 32, 8, 2),),
    ("dq", 64): (Config(128, 32, 8, 3), Config(128, 64, 8, 2), Config(64, 64, 4, 2)),
    ("dq", 128): (Config(64, 64, 8, 2), Config(64, 64, 4, 2), Config(64, 32, 4, 2)),
    ("dq", 256): (Config(32, 32, 8, 2), Config(64, 32, 8, 1)),
    ("dkdv", 64): (Config(32, 128, 8, 2), Config(64, 64, 4, 2)),
    ("dkdv", 128): (Config(64, 64, 8, 2), Config(32, 64, 4, 2)),
    ("dkdv", 256): (Config(32, 32, 8, 2),),
}
# fp32 inputs, on either architecture: tiles in parts, see `columns`.
_SINGLE_PRECISION: _Table = {
    ("forward", 64): (Config(32, 32, 4, 1), Config(64, 32, 8, 1)),
    ("forward", 128): (Config(32, 16, 8, 1), Config(32, 32, 4, 1)),
    ("forward", 256): (Config(32, 16, 8, 1),),
    ("dq", 64): (Config(32, 32, 4, 1), Config(32, 32, 8, 1)),
    ("dq", 128): (Config(32, 16, 8, 1), Config(32, 32, 8, 1)),
    ("dq", 256): (Config(32, 32, 8, 1), Config(32, 16, 8, 1)),
    ("dkdv", 64): (Config(32, 32, 8, 1), Config(16, 32, 8, 1)),
    ("dkdv", 128): (Config(16, 32, 8, 1), Config(32, 32, 8, 1)),
    ("dkdv", 256): (Config(32, 32, 8, 1), Config(16, 32, 8, 1)),
}
# q and k rotated inside the kernel, V as it comes; on either architecture.
_ROTATED: _Table = {
    ("forward", 64): (Config(32, 16, 4, 1), Config(64, 32, 8, 1)),
    ("forward", 128): (Config(64, 32, 8, 1), Config(32, 32, 4, 1)),
    ("forward", 256): (Config(32, 16, 4, 1), Config(64, 32, 8, 1)),
    ("dq", 64): (Config(32, 16, 4, 1), Config(32, 16, 8, 1)),
    ("dq", 128): (Config(32, 16, 8, 1), Config(32, 16, 4, 1)),
    ("dq", 256): (Config(32, 16, 8, 1),),
    ("dkdv", 64): (Config(16, 16, 4, 1), Config(32, 16, 4, 1)),
    ("dkdv", 128): (Config(16, 32, 8, 1), Config(32, 16, 8, 1)),
    ("dkdv", 256): (Config(32, 16, 8, 1), Config(16, 32, 8, 1)),
}

_tuned: dict[tuple, Config] = {}


def block_columns(head_dim: int) -> int:
    """Columns of a tile: the next power of two, 16 at least (what a tensor-core product takes)."""
    return max(16, 1 << (head_dim - 1).bit_length())


def prepare_config(head_dim: int) -> Config:
    """Rows of an iteration of `prepare_kernel`, which holds three tiles of them."""
    return PREPARE if block_columns(head_dim) <= 128 else ANCHOR_BACKWARD


def columns(head_dim: int, dtype: torch.dtype, rope: bool) -> dict[str, int | bool]:
    """Constants of the kernels with tiles: the columns of these; legend in :mod:`.triton_ops`."""
    resident = not rope and dtype != torch.float32
    half = head_dim // 2
    whole = block_columns(half if rope else head_dim)
    return {
        "HEAD_DIM": head_dim,
        "HALF_D": half,
        "PART": whole if resident else min(whole, PART_COLUMNS),
        "STEP": whole if resident else min(whole, ROTATED_STEP if rope else SINGLE_STEP),
        "ROPE": rope,
        "RESIDENT": resident,
    }


def candidates(
    kernel: str, head_dim: int, dtype: torch.dtype, rope: bool, capability: tuple[int, int]
) -> tuple[Config, ...]:
    """The configurations worth trying on a device of ``capability``, the default first."""
    if rope:
        table = _ROTATED
    elif dtype == torch.float32:
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
