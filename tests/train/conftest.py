"""A tiny model's config and prepared windows for it."""

import numpy as np
import pytest

from anchorcontext.data import WindowRecord, build_folder
from anchorcontext.testing.configs import tiny_run

VOCAB = 128


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """A folder of 8 windows of 24 tokens: anchor 0, documents of uneven lengths."""
    path = tmp_path_factory.mktemp("prepared") / "windows"
    rng = np.random.default_rng(0)

    def record(number):
        cuts = np.sort(rng.choice(np.arange(2, 24), size=3, replace=False))
        ids = np.r_[0, rng.integers(1, VOCAB, 23)]
        return WindowRecord(
            ids, np.r_[0, 1, cuts, 24], np.array([-1, 0, 1, 2, 3]), np.zeros(5, dtype=np.int64)
        )

    with build_folder(path) as builder:
        builder.write_documents([(["s"] * 4, ["a", "b", "c", "d"], np.array([9, 9, 9, 9]))])
        builder.write_windows(record(number) for number in range(8))
        builder.write_meta(
            {"anchor_id": 0, "vocab_size": VOCAB, "window_tokens": 24, "num_documents": 4}
        )
    return path


@pytest.fixture
def tiny(prepared, tmp_path):
    """Make a config of a tiny LLaMA; sections given as keywords are merged into the defaults."""

    def make(**sections):
        return tiny_run(prepared, 24, tmp_path / "runs", **sections)

    return make
