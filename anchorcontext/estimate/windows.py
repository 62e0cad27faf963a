"""Windows to plan with: drawn from a named mix of document lengths, or prepared ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import UserError
from ..plan.mixes import mix_lengths
from ..window import Window

if TYPE_CHECKING:
    from ..config import Config

MIXES = ("slimpajama", "upsampled", "stdlib", "prepared")
STDLIB_BYTES_PER_TOKEN = 3.87
"""What the demo's tokenizer of 8,192 entries comes to on these files."""


def default_mix(config: Config) -> str:
    """``prepared`` where the windows lie ready, ``stdlib`` where that is the only source."""
    from ..data.store import known_meta

    meta = known_meta(Path(config.data.path).expanduser())
    if meta is not None and meta["window_tokens"] == config.data.window_tokens:
        return "prepared"
    kinds = {source.kind for source in config.data.sources}
    return "stdlib" if kinds == {"stdlib"} else "slimpajama"


def sample_windows(config: Config, mix: str, count: int) -> list[Window]:
    """``count`` windows; the anchor is in front where the config's data has one. Deterministic.

    Token ids are zeros: neither work nor traffic depends on them.

    Raises:
        UserError: an unknown mix; ``prepared`` and there is no prepared data.
    """
    if mix not in MIXES:
        raise UserError(f"--mix {mix!r}: must be one of {', '.join(MIXES)}")
    if mix == "prepared":
        return _prepared(config, count)
    anchor = config.data.shared_anchor
    tokens = config.data.window_tokens - anchor
    draw = _stdlib_lengths if mix == "stdlib" else lambda n, seed: mix_lengths(mix, n, seed)
    return [_window(draw(tokens, seed), anchor, config.loss.boundary) for seed in range(count)]


def _window(lengths: np.ndarray, anchor: bool, boundary: str) -> Window:
    edges = np.cumsum([0, *([1] if anchor else []), *lengths.tolist()])
    return Window(np.zeros(edges[-1], dtype=np.int64), edges, "full", boundary=boundary)


def _prepared(config: Config, count: int) -> list[Window]:
    from ..data.store import WindowDataset

    dataset = WindowDataset(config.data.path)
    if dataset.window_tokens != config.data.window_tokens:
        raise UserError(
            f"--mix prepared: {dataset.path} holds windows of {dataset.window_tokens} tokens, "
            f"data.window_tokens = {config.data.window_tokens}; make them equal, or choose another "
            "mix"
        )
    chosen = np.unique(np.linspace(0, len(dataset) - 1, count).astype(int)).tolist()
    windows = [dataset[index].window("full", config.loss.boundary) for index in chosen]
    return [windows[index % len(windows)] for index in range(count)]


def _stdlib_lengths(window_tokens: int, seed: int) -> np.ndarray:
    from ..data.sources import StandardLibrary

    files = [path for path in StandardLibrary("stdlib").files() if "pydoc_data" not in path.parts]
    sizes = np.array([path.stat().st_size for path in files], dtype=np.int64)
    sizes = np.maximum(sizes[sizes > 0] / STDLIB_BYTES_PER_TOKEN, 1).astype(np.int64)
    np.random.default_rng(seed).shuffle(sizes)
    sizes = np.tile(sizes, -(-window_tokens // int(sizes.sum())))
    last = int(np.searchsorted(np.cumsum(sizes), window_tokens))
    lengths = sizes[: last + 1].copy()
    lengths[-1] -= int(lengths.sum()) - window_tokens
    return lengths
