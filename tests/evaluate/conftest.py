"""Prepared windows with a validation split, and a tiny model's config for them."""

import numpy as np
import pytest

from anchorcontext.data import WindowRecord, build_folder
from anchorcontext.data.store import VALIDATION
from anchorcontext.data.tokenizer import train_tokenizer
from anchorcontext.evaluate.needles import NAMES, NEEDLE, QUESTION
from anchorcontext.testing.configs import tiny_run

VOCAB, LENGTH = 128, 64
DOCUMENTS = {4: 90, 5: 30, 6: 71, 7: 40, 8: 20}
"""Held-out documents and their tokens, cut by windows as ``concat`` packing does."""


def training_windows(rng):
    for _ in range(6):
        cuts = np.sort(rng.choice(np.arange(2, LENGTH), size=3, replace=False))
        edges, documents = np.r_[0, 1, cuts, LENGTH], np.array([-1, 0, 1, 2, 3])
        yield WindowRecord(
            np.r_[0, rng.integers(1, VOCAB, LENGTH - 1)], edges, documents, np.zeros(5, np.int64)
        )


@pytest.fixture(scope="session")
def held_out_texts():
    """Document number -> token ids, int64."""
    rng = np.random.default_rng(1)
    return {number: rng.integers(1, VOCAB, tokens) for number, tokens in DOCUMENTS.items()}


def held_out_windows(texts):
    """The documents as one stream behind an anchor in each window; the last window is short."""
    stream = [(number, start) for number, ids in texts.items() for start in range(len(ids))]
    for first in range(0, len(stream), LENGTH - 1):
        numbers, places = np.array(stream[first : first + LENGTH - 1]).T
        opens = np.flatnonzero(np.r_[True, numbers[1:] != numbers[:-1]])
        ids = [texts[number][place] for number, place in zip(numbers, places, strict=True)]
        yield WindowRecord(
            np.r_[0, ids],
            np.r_[0, opens + 1, len(numbers) + 1],
            np.r_[-1, numbers[opens]],
            np.r_[0, places[opens]],
        )


def needle_tokenizer():
    """A tokenizer of few tokens a prompt: it knows all words of a needle and its question."""
    texts = [(NEEDLE + QUESTION).format(name=name, number=1234567) for name in NAMES]
    return train_tokenizer(texts * 9, 420)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory, held_out_texts):
    """6 windows of 64 tokens to train on; 4 held-out ones, the last of 63 tokens; a tokenizer."""
    tokenizer = needle_tokenizer()
    path = tmp_path_factory.mktemp("prepared") / "windows"
    names = [f"d{number}" for number in range(9)]
    sizes = np.array([9, 9, 9, 9, *DOCUMENTS.values()])
    with build_folder(path) as builder:
        builder.write_documents([(["s"] * 9, names, sizes)])
        builder.write_windows(training_windows(np.random.default_rng(0)))
        builder.write_windows(held_out_windows(held_out_texts), VALIDATION)
        builder.write_meta(
            {
                "anchor_id": 0,
                "vocab_size": len(tokenizer),
                "window_tokens": LENGTH,
                "num_documents": 9,
            }
        )
        tokenizer.save_pretrained(builder.folder / "tokenizer")
    return path


@pytest.fixture
def tiny(prepared, tmp_path):
    """Make a config of a tiny LLaMA; sections given as keywords are merged into the defaults."""

    def make(**sections):
        train = {"windows_per_step": 2, **sections.pop("train", {})}
        return tiny_run(prepared, LENGTH, tmp_path / "runs", train=train, **sections)

    return make
