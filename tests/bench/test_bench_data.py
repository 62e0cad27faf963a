"""bench data: contenders agree about the tokens, and the section names command and machine."""

import pytest

from anchorcontext.bench.data import BASELINE, bench_data, data_markdown
from anchorcontext.data import train_tokenizer


def test_contenders_tokenise_the_same_texts(monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    tokenizer = train_tokenizer(["def some_words(and, more): return words"] * 3, 280)
    results = bench_data(1, workers=2, repeats=2, tokenizer=tokenizer)
    assert [result.contender for result in results] == [
        BASELINE,
        "prepare, 1 worker",
        "prepare, 2 workers",
    ]
    assert len({result.tokens for result in results}) == 1 and results[0].tokens > 100_000
    assert results[0].over_baseline == 1.0
    page = data_markdown(results, "On this machine.", "anchorcontext bench data")
    assert "On this machine." in page and "| prepare, 2 workers |" in page
