"""Training refuses windows that were prepared for another config."""

from __future__ import annotations

import pytest

from anchorcontext.config import parse_config
from anchorcontext.data import WindowDataset, prepare, train_tokenizer
from anchorcontext.data.agreement import check_prepared
from anchorcontext.errors import UserError

TEXTS = {name: [f"{name} {i} " * 30 for i in range(20)] for name in ("first", "second")}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agreement")
    (folder / "texts").mkdir()
    for i, text in enumerate(TEXTS["first"]):
        (folder / "texts" / f"{i}.txt").write_text(text)
    for name, texts in TEXTS.items():
        train_tokenizer(texts, 270).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def config_of(folders):
    def make(path="windows", **data):
        values = {
            "path": str(folders / path),
            "sources": [{"path": str(folders / "texts")}],
            "tokenizer": str(folders / "first"),
            "window_tokens": 64,
            **data,
        }
        model = {"scratch": {"model_type": "llama"}}
        train = {"steps": 1, "windows_per_step": 1}
        return parse_config({"run": {"name": "a"}, "model": model, "data": values, "train": train})

    return make


@pytest.fixture(scope="module")
def windows(config_of):
    prepare(config_of())
    return WindowDataset(config_of().data.path)


def test_the_config_that_prepared_the_windows_agrees(windows, config_of):
    check_prepared(windows, config_of())
    check_prepared(windows, config_of(sources=[]))  # the corpus may be gone


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"add_eos": False}, "data.add_eos = False, prepared with True"),
        ({"tags": "{source}: "}, "data.tags = '{source}: ', prepared with None"),
        ({"interleave": True}, "data.interleave = {'pieces': [2, 3]"),
        ({"packing": {"method": "best_fit"}}, "data.packing = {'method': 'best_fit'"),
        ({"anchor": 5}, "data.anchor = 5, prepared with 'auto'"),
        ({"min_document_tokens": 9}, "data.min_document_tokens = 9, prepared with 1"),
        ({"window_tokens": 32}, "data.window_tokens = 32, prepared with 64"),
        (
            {"tokenizer": None, "train_tokenizer": {"vocab_size": 300}},
            "vocab_size = 300, prepared with another tokenizer",
        ),
    ],
)
def test_other_options_are_named_with_both_values(windows, config_of, change, message):
    with pytest.raises(UserError, match="prepared differently") as raised:
        check_prepared(windows, config_of(**change))
    assert message in str(raised.value)


def test_a_tokenizer_of_equal_size_with_other_ids_is_refused(windows, config_of, folders):
    with pytest.raises(UserError, match="gives other ids"):
        check_prepared(windows, config_of(tokenizer=str(folders / "second")))


def test_a_trained_tokenizer_is_compared_by_its_size(config_of):
    options = {"tokenizer": None, "train_tokenizer": {"vocab_size": 270}}
    config = config_of("trained", **options)
    prepare(config)
    windows = WindowDataset(config.data.path)
    check_prepared(windows, config)
    other = config_of("trained", tokenizer=None, train_tokenizer={"vocab_size": 280})
    with pytest.raises(UserError, match="vocab_size = 280, prepared with 270"):
        check_prepared(windows, other)


def test_options_with_sections_agree_with_what_was_written(config_of):
    options = {"interleave": True, "upsample": {"keep": 1.0}, "tags": "{source}: "}
    config = config_of("options", **options)
    prepare(config)
    check_prepared(WindowDataset(config.data.path), config)
    assert prepare(config).reused
