"""A fingerprint of weights on disk, by which stored results know whose they are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

SUFFIXES = (".safetensors", ".bin", ".pt")
SAMPLED_BLOCKS, BLOCK_BYTES = 64, 1 << 16


def folder_digest(folder: str | Path) -> str:
    """Of the weights and the ``config.json`` of a Hugging Face folder."""
    folder = Path(folder)
    return weights_digest(folder, folder.iterdir(), described=folder / "config.json")


def weights_digest(folder: Path, files: Iterable[Path], *, described: Path) -> str:
    """``described`` whole; of each file of weights its name, its size and 64 blocks spread over it.

    Args:
        files: in or below ``folder``; what holds no weights is passed over.
        described: what else tells the weights apart, a config or a manifest.
    """
    hasher = hashlib.blake2b(digest_size=16)
    for file in sorted(path for path in files if path.suffix in SUFFIXES):
        size = file.stat().st_size
        hasher.update(f"{file.relative_to(folder)} {size}".encode())
        with file.open("rb") as handle:
            for block in range(SAMPLED_BLOCKS):
                handle.seek(block * size // SAMPLED_BLOCKS)
                hasher.update(handle.read(BLOCK_BYTES))
    hasher.update(described.read_bytes())
    return hasher.hexdigest()
