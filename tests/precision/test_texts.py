"""Texts: BOS once, real tokens in order, none twice, the same whatever is asked besides."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from anchorcontext.data.tokenizer import load_tokenizer
from anchorcontext.errors import UserError
from anchorcontext.precision.first_token.measure import FirstTokenSettings, first_token_units
from anchorcontext.precision.gradients.measure import GradientSettings, gradient_units
from anchorcontext.precision.rope.measure import RopeSettings, rope_units
from anchorcontext.precision.texts import read_texts


def test_every_text_is_bos_and_the_next_tokens(short_model: Path, corpus: Path) -> None:
    texts = read_texts(str(short_model), 3, 100, source=str(corpus), seed=1)
    tokenizer = load_tokenizer(short_model)
    assert all(text.ids[0] == tokenizer.bos_token_id and len(text.ids) == 100 for text in texts)
    joined = torch.cat([text.ids[1:] for text in texts])
    assert not (joined == tokenizer.bos_token_id).any()
    begin = (corpus / texts[0].document).read_text()
    assert tokenizer.decode(texts[0].ids[1:60]) in begin
    # Consecutive pieces: the second text goes on where the first one ended.
    whole = tokenizer.decode(joined[:150])
    assert whole.startswith(begin[:80])
    assert len({text.digest for text in texts}) == 3


def test_more_texts_leave_the_first_ones_as_they_are(short_model: Path, corpus: Path) -> None:
    few, many = (read_texts(str(short_model), n, 80, source=str(corpus)) for n in (2, 4))
    assert [t.digest for t in few] == [t.digest for t in many[:2]]
    other = read_texts(str(short_model), 2, 80, source=str(corpus), seed=5)
    assert [t.digest for t in few] != [t.digest for t in other]


def test_the_standard_library_gives_prose_and_code_in_turn(short_model: Path) -> None:
    texts = read_texts(str(short_model), 4, 64)
    assert [text.domain for text in texts] == ["prose", "code"] * 2
    assert texts[0].document.startswith("topics/")


def test_too_few_tokens_name_what_there_is(short_model: Path, corpus: Path) -> None:
    with pytest.raises(UserError, match=r"99 texts of 500 tokens: .* gives \d+ .*12 documents of"):
        read_texts(str(short_model), 99, 500, source=str(corpus))


def test_a_source_that_is_not_there(short_model: Path) -> None:
    with pytest.raises(UserError, match="no such file or folder"):
        read_texts(str(short_model), 1, 10, source="nowhere")


def test_units_know_the_corpus_and_the_tokenizer(
    short_model: Path, corpus: Path, tmp_path: Path
) -> None:
    model, source = shutil.copytree(short_model, tmp_path / "model"), tmp_path / "corpus"
    shutil.copytree(corpus, source)

    def facts() -> list[object]:
        where = {"model": str(model), "source": str(source)}
        return [
            gradient_units(GradientSettings(**where, arms=("bf16",)))[0].facts,
            first_token_units(FirstTokenSettings(**where))[0].facts,
            rope_units(RopeSettings(**where, sources=("pretrained:bf16",), layers=(0,)))[0].facts,
        ]

    first = facts()
    assert facts() == first
    (source / "one_more.txt").write_text("A document that was not there before.")
    second = facts()
    assert all(a != b for a, b in zip(first, second, strict=True))
    rules = json.loads((model / "tokenizer.json").read_text())
    rules["added_tokens"].append({**rules["added_tokens"][0], "id": 10_000, "content": "<more>"})
    (model / "tokenizer.json").write_text(json.dumps(rules))
    assert all(a != b for a, b in zip(second, facts(), strict=True))
