"""Prepared windows of uneven documents, and a config of a tiny LLaMA that trains on them."""

import numpy as np
import pytest

from anchorcontext.config import parse_config, save_config
from anchorcontext.data import WindowRecord, build_folder

VOCAB, WINDOW = 128, 64
DOCUMENTS = ((7, 13, 5, 23, 15), (1, 30, 9, 20, 3), (40, 11, 12), (2, 2, 2, 57))


@pytest.fixture(scope="session")
def windows_folder(tmp_path_factory):
    """4 windows of 64 tokens: anchor 0 and documents of the lengths above."""
    path = tmp_path_factory.mktemp("prepared") / "windows"
    rng = np.random.default_rng(0)
    count = sum(map(len, DOCUMENTS))
    numbers = iter(range(count))

    def record(lengths):
        ids = np.r_[0, rng.integers(1, VOCAB, WINDOW - 1)]
        documents = np.array([-1, *(next(numbers) for _ in lengths)])
        starts = np.zeros(len(documents), dtype=np.int64)
        return WindowRecord(ids, np.cumsum([0, 1, *lengths]), documents, starts)

    with build_folder(path) as builder:
        names = [str(number) for number in range(count)]
        builder.write_documents([(["s"] * count, names, np.full(count, 60))])
        builder.write_windows(map(record, DOCUMENTS))
        builder.write_meta(
            {
                "anchor_id": 0,
                "vocab_size": VOCAB,
                "window_tokens": WINDOW,
                "num_documents": count,
            }
        )
    return path


def config_values(windows_folder, output_dir, **sections):
    values = {
        "run": {"name": "tiny", "output_dir": str(output_dir)},
        "model": {
            "dtype": "fp32",
            "scratch": {
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
            },
        },
        "data": {"path": str(windows_folder), "tokenizer": "none", "window_tokens": WINDOW},
        "attention": {"layout": "zigzag"},
        "optimizer": {"type": "sgd", "lr": 0.1},
        "parallel": {"sp": 2},
        "train": {"steps": 2, "windows_per_step": 2},
        "parity": {"stock_tokens": 40},
        "watch": {"progress": False},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return values


@pytest.fixture(scope="session")
def make_config(windows_folder, tmp_path_factory):
    """Make a config; sections given as keywords are merged into the defaults."""
    runs = tmp_path_factory.mktemp("runs")
    return lambda **sections: parse_config(config_values(windows_folder, runs, **sections))


@pytest.fixture(scope="session")
def config_file(make_config, tmp_path_factory):
    """As ``make_config``, written to a YAML file."""

    def make(**sections):
        path = tmp_path_factory.mktemp("config") / "tiny.yaml"
        save_config(make_config(**sections), path)
        return path

    return make
