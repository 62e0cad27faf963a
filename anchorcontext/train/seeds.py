"""Seeds of every random number generator that a run uses."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch (all devices): equal on all ranks, so that weights are."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
