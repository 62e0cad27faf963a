"""A corpus of 40 rows and 5 source files, its tokenizer, and a config that prepares it; windows
that say their number."""

import json

import numpy as np
import pytest

from anchorcontext.config import parse_config
from anchorcontext.data import WindowDataset, WindowRecord, build_folder, train_tokenizer

DOCUMENTS = [f"Document {i}. " + "words and more words " * (i % 7) for i in range(40)]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    rows = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
    (folder / "rows.jsonl").write_text(rows)
    (folder / "code").mkdir()
    for i in range(5):
        (folder / "code" / f"{i}.py").write_text(f"def f{i}():\n    return {i}\n" * (3 * i + 1))
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(DOCUMENTS, 280).save_pretrained(folder)
    return folder


@pytest.fixture
def config(corpus, tokenizer_folder, tmp_path):
    def make(**data):
        values = {
            "path": str(tmp_path / "out"),
            "sources": [
                {"path": str(corpus / "rows.jsonl"), "name": "prose"},
                {"path": str(corpus / "code"), "name": "code"},
            ],
            "tokenizer": str(tokenizer_folder),
            "window_tokens": 64,
            "workers": 1,
        }
        return parse_config(
            {
                "run": {"name": "test"},
                "model": {"scratch": {"model_type": "llama", "vocab_size": 512}},
                "data": {**values, **data},
                "attention": {"mode": "full"},
                "train": {"steps": 1, "windows_per_step": 1},
            }
        )

    return make


@pytest.fixture(scope="session")
def numbered(tmp_path_factory):
    """Make a dataset of so many windows of 5 tokens, an anchor and 4 times the window's number."""
    made = {}

    def make(num_windows):
        if num_windows in made:
            return made[num_windows]
        path = tmp_path_factory.mktemp("numbered") / "windows"
        edges, documents, starts = np.array([0, 1, 5]), np.array([-1, 0]), np.array([0, 0])
        with build_folder(path) as builder:
            builder.write_documents([(["s"], ["a"], np.array([4]))])
            builder.write_windows(
                WindowRecord(np.r_[0, np.full(4, i)], edges, documents, starts)
                for i in range(num_windows)
            )
            builder.write_meta(
                {"anchor_id": 0, "vocab_size": 99, "window_tokens": 5, "num_documents": 1}
            )
        return made.setdefault(num_windows, WindowDataset(path))

    return make
