"""What makes two runs alike: seeds of every random number generator, deterministic operators."""

from __future__ import annotations

import os
import random

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch (all devices): equal on all ranks, so that weights are."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def use_deterministic_operators() -> None:
    """Let torch run only operators that give the same bits in every run; an error where one has no
    such form. Before the first CUDA operation, since cuBLAS reads its setting once."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Also a debugging aid that fills every new tensor; no result depends on it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
