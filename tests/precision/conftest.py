"""A tiny model folder with a tokenizer, and texts for it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from anchorcontext.data.tokenizer import train_tokenizer
from anchorcontext.testing.models import tiny_llama

WORDS = ["shift", "every", "position", "and", "nothing", "moves", "but", "rounding", "errors"]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny LLaMA in fp32 with a byte-level tokenizer of 300 tokens."""
    folder = tmp_path_factory.mktemp("model")
    texts = [" ".join(WORDS[(i * j) % 9] for i in range(200)) for j in range(1, 8)]
    tokenizer = train_tokenizer(texts, 300)
    tokenizer.save_pretrained(folder)
    tiny_llama(vocab_size=len(tokenizer)).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Text files of some hundreds of tokens."""
    folder: Path = tmp_path_factory.mktemp("documents")
    for number in range(3):
        text = " ".join(WORDS[(number + i * i) % 9] for i in range(400))
        (folder / f"{number}.txt").write_text(text)
    return str(folder)


def make_text(seed: int, words: int) -> str:
    """Different for every seed."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


@pytest.fixture(scope="session")
def short_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaMA of 600 positions with peaked attention, and its tokenizer."""
    folder = tmp_path_factory.mktemp("short")
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
