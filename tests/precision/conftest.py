"""A tiny model with its tokenizer in a folder, and a small corpus."""

from __future__ import annotations

from pathlib import Path

import pytest

from anchorcontext.data.tokenizer import train_tokenizer
from anchorcontext.testing.models import tiny_llama

WORDS = ("the", "anchor", "sees", "every", "token", "and", "a", "shift", "should", "change", "no")


def make_text(seed: int, words: int) -> str:
    """Different for every seed."""
    return " ".join(WORDS[(seed * 7 + n * n) % len(WORDS)] for n in range(words))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaMA of 2 layers and 4 heads with 600 positions, peaked attention, vocabulary 300."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer([make_text(seed, 200) for seed in range(4)], 300)
    model = tiny_llama(vocab_size=300, max_position_embeddings=600, initializer_range=0.15)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 12 text files."""
    folder = tmp_path_factory.mktemp("documents") / "corpus"
    folder.mkdir()
    for seed in range(12):
        (folder / f"{seed:02d}.txt").write_text(make_text(seed, 120))
    return folder
