"""prepare: an account of every token; windows that hold what the config asks for."""

import json
import os
import shutil

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import processors

from anchorcontext.cli import group
from anchorcontext.config import save_config
from anchorcontext.data import Loader, WindowDataset, load_tokenizer, prepare
from anchorcontext.errors import UserError


def in_and_out(report):
    return report.tokens_in, report.tokens_kept + sum(d.tokens for d in report.dropped.values())


def test_windows_hold_every_document_in_order(config, corpus):
    report = prepare(config())
    dataset = WindowDataset(report.path)
    tokenizer = load_tokenizer(dataset.tokenizer_path)
    assert report.tokens_in == report.tokens_kept and report.dropped == {}
    assert report.documents == 45 and report.windows == len(dataset)
    found = {}
    for record in dataset:
        assert record.input_ids.dtype == np.int32 and len(record.input_ids) <= 64
        assert record.input_ids[0] == tokenizer.bos_token_id == dataset.anchor_id
        assert record.cu_seqlens[:2].tolist() == [0, 1] and record.documents[0] == -1
        edges = record.cu_seqlens.tolist()
        for begin, end, document, start in zip(
            edges[1:-1], edges[2:], record.documents[1:], record.starts[1:], strict=True
        ):
            tokens = found.setdefault(int(document), [])
            assert len(tokens) == start
            tokens += record.input_ids[begin:end].tolist()
    assert sorted(found) == list(range(45))
    code = [(corpus / "code" / f"{i}.py").read_text() for i in range(5)]
    texts = [json.loads(row)["text"] for row in (corpus / "rows.jsonl").read_text().splitlines()]
    for index, text in enumerate(texts + code):
        info = dataset.document(index)
        assert found[index][-1] == tokenizer.eos_token_id
        assert tokenizer.decode(found[index][:-1]) == text
        assert info.num_tokens == len(found[index])
        assert (info.source, info.name) == (
            ("prose", f"rows.jsonl:{index + 1}") if index < 40 else ("code", f"{index - 40}.py")
        )


def test_kept_and_dropped_are_what_went_in(config):
    report = prepare(config(min_document_tokens=20, max_windows=3, add_eos=False))
    assert set(report.dropped) == {"min_document_tokens", "max_windows"}
    assert report.windows == 3 and report.tokens_kept == 3 * 63
    tokens_in, tokens_out = in_and_out(report)
    assert tokens_in == tokens_out == sum(part.tokens for part in report.sources.values())
    assert report.tokens_kept == sum(part.kept for part in report.sources.values())
    assert report.eos_added == 0


@pytest.mark.parametrize("kind", ["adds it", "template renders it", "neither", "already there"])
def test_one_bos_a_window_whatever_the_tokenizer_does(config, tmp_path, tokenizer_folder, kind):
    tokenizer = load_tokenizer(tokenizer_folder)
    bos = tokenizer.bos_token_id
    assert tokenizer("x").input_ids[0] == bos
    if kind == "neither":
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel()
        assert tokenizer("x").input_ids[0] != bos
    texts = ["first words", "more words", "last words"]
    if kind == "template renders it":
        tokenizer.chat_template = "{{ bos_token }}{{ messages[0].content }}"
        texts = [
            tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
            for text in texts
        ]
    elif kind == "already there":
        texts = [tokenizer.decode(tokenizer(text).input_ids) for text in texts]
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "rows.jsonl").write_text(rows)
    report = prepare(
        config(
            sources=[{"path": str(tmp_path / "rows.jsonl")}], tokenizer=str(tmp_path / "tokenizer")
        )
    )
    (record,) = WindowDataset(report.path)
    assert (record.input_ids == bos).nonzero()[0].tolist() == [0]
    text = tokenizer.decode(record.input_ids[1:].tolist())
    assert text == "".join(f"{part} words<|eos|>" for part in ("first", "more", "last"))


def test_the_anchors_id_inside_a_document_is_a_token_like_any_other(config, tmp_path):
    texts = ["one<|bos|>two", "three<|bos|><|bos|>four"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    report = prepare(config(sources=[{"path": str(tmp_path / "rows.jsonl")}]))
    (record,) = WindowDataset(report.path)
    window = record.window("anchor")
    assert (record.input_ids == record.input_ids[0]).sum() == 4
    assert len(set(window.doc_ids.tolist())) == 3 and report.dropped == {}
    assert [int(n) for n in np.diff(record.cu_seqlens)][1:] == [
        WindowDataset(report.path).document(i).num_tokens for i in (0, 1)
    ]


def held_out_names(path):
    validation = WindowDataset(path, "validation")
    rows = {int(row) for record in validation for row in record.documents if row >= 0}
    return {validation.document(row).name for row in rows}


def test_held_out_documents_are_in_validation_windows_alone_whatever_the_order(config, corpus):
    report = prepare(config(validation_fraction=0.3))
    train, validation = WindowDataset(report.path), WindowDataset(report.path, "validation")
    assert report.validation.windows == len(validation) and report.windows == len(train)
    rows = [
        {int(row) for record in split for row in record.documents if row >= 0}
        for split in (train, validation)
    ]
    assert not rows[0] & rows[1] and rows[0] | rows[1] == set(range(45))
    assert len(rows[1]) == report.validation.documents
    assert in_and_out(report)[0] == in_and_out(report)[1]
    assert report.validation.tokens == sum(
        len(record.input_ids) - 1 for record in WindowDataset(report.path, "validation")
    )
    names = held_out_names(report.path)
    (corpus / "backwards.jsonl").write_text(
        "".join(reversed((corpus / "rows.jsonl").read_text().splitlines(keepends=True)))
    )
    backwards = {
        f"rows.jsonl:{41 - int(name.rsplit(':')[1])}"
        for name in held_out_names(
            prepare(
                config(
                    path=report.path + "2",
                    sources=[{"path": str(corpus / "backwards.jsonl")}],
                    validation_fraction=0.3,
                    shuffle_documents=True,
                )
            ).path
        )
    }
    assert backwards == {name for name in names if name.startswith("rows.jsonl")}


def test_a_folder_without_held_out_documents_says_so(config):
    with pytest.raises(UserError, match=r"has no split 'validation'.*validation_fraction"):
        WindowDataset(prepare(config()).path, "validation")
    with pytest.raises(UserError, match="holds out none of 45 documents"):
        prepare(config(validation_fraction=1e-9, window_tokens=32), force=True)


def test_shares_are_of_kept_tokens_and_the_rest_is_counted(config):
    report = prepare(config(shares={"prose": 2, "code": 1}, shuffle_documents=True))
    kept = [part.kept for part in report.sources.values()]
    assert abs(kept[0] - 2 * kept[1]) <= 2 * 150 and report.dropped["shares"].tokens > 0
    assert in_and_out(report)[0] == in_and_out(report)[1]
    dataset = WindowDataset(report.path)
    rows = [row for record in dataset for row in record.documents[1:].tolist()]
    order = [dataset.document(row).source for row in rows]
    assert order != sorted(order) and order != sorted(order, reverse=True)


LINES = st.sampled_from(
    [
        '{"text": "some words"}',
        json.dumps({"text": "long " * 60}),
        '{"text": "<|bos|>x"}',
        '{"text": ""}',
        '{"text": "a\\u0000"}',
        '{"txt": 1}',
        "[1]",
        "broken",
        "",
    ]
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lines=st.lists(LINES, min_size=1, max_size=25),
    options=st.fixed_dictionaries(
        {
            "anchor": st.sampled_from(["auto", "none"]),
            "add_eos": st.booleans(),
            "min_document_tokens": st.integers(1, 9),
            "max_windows": st.none() | st.integers(1, 3),
            "validation_fraction": st.sampled_from([0.0, 0.4]),
            "shuffle_documents": st.booleans(),
            "max_document_characters": st.sampled_from([100, 1000]),
        }
    ),
)
def test_every_entry_and_every_token_is_kept_or_counted(config, tmp_path, lines, options):
    (tmp_path / "rows.jsonl").write_text("\n".join(["{}", *lines]))
    made = config(
        sources=[{"path": str(tmp_path / "rows.jsonl")}],
        on_error="skip",
        window_tokens=16,
        **options,
    )
    try:
        report = prepare(made, force=True)
    except UserError as error:
        assert any(rule in str(error) for rule in ("no document", "no window", "holds out none"))
        return
    assert in_and_out(report)[0] == in_and_out(report)[1]
    assert report.documents + sum(report.problems.values()) == 1 + sum(map(bool, lines))
    assert len((tmp_path / "out" / "problems.jsonl").read_text().splitlines()) == sum(
        report.problems.values()
    )
    splits = ["train", *(["validation"] if report.validation else [])]
    records = [record for split in splits for record in WindowDataset(report.path, split)]
    anchors = len(records) * (options["anchor"] == "auto")
    assert sum(len(record.input_ids) for record in records) - anchors == report.tokens_kept
    assert sum(entry.tokens for entry in report.length_histogram) == sum(
        part.tokens for part in report.sources.values()
    )


def test_rendered_anchors_are_dropped_and_counted(config, tmp_path, tokenizer_folder):
    bos = load_tokenizer(tokenizer_folder).bos_token
    (tmp_path / "bos.jsonl").write_text(json.dumps({"text": f"{bos}one two"}) + "\n")
    report = prepare(config(sources=[{"path": str(tmp_path / "bos.jsonl")}]))
    assert report.dropped["rendered_anchor"].tokens == 1
    assert in_and_out(report)[0] == in_and_out(report)[1]
    record = WindowDataset(report.path)[0]
    assert (record.input_ids == load_tokenizer(tokenizer_folder).bos_token_id).sum() == 1


def test_windows_without_an_anchor(config):
    dataset = WindowDataset(prepare(config(anchor="none")).path)
    assert dataset.anchor_id is None
    assert all(len(record.input_ids) == 64 for record in list(dataset)[:-1])
    assert dataset[0].documents[0] == 0
    with pytest.raises(UserError, match="mode = 'anchor' needs windows with an anchor"):
        Loader(dataset)


def test_the_same_request_is_reused_and_another_one_refused(config, corpus, tmp_path):
    first = prepare(config())
    before = os.stat(tmp_path / "out" / "meta.json").st_mtime_ns
    second = prepare(config())
    assert second.reused and not first.reused
    assert os.stat(tmp_path / "out" / "meta.json").st_mtime_ns == before
    assert {**vars(second), "reused": False} == vars(first)

    with pytest.raises(UserError, match="window_tokens: was 64, now 32\nprepare with --force"):
        prepare(config(window_tokens=32))
    assert WindowDataset(tmp_path / "out").fingerprint == first.fingerprint
    forced = prepare(config(window_tokens=32), force=True)
    assert not forced.reused and WindowDataset(tmp_path / "out").window_tokens == 32
    assert sorted(os.listdir(tmp_path)) == ["out"]


def test_a_folder_that_lost_something_is_not_reused(config, tmp_path):
    made = prepare(config(validation_fraction=0.2))
    whole = tmp_path / "whole"
    shutil.copytree(tmp_path / "out", whole)
    files = ["windows-00000.arrow", "validation-00000.arrow", "documents.arrow", "tokenizer"]
    for name in files:
        shutil.rmtree(tmp_path / "out")
        shutil.copytree(whole, tmp_path / "out")
        assert prepare(config(validation_fraction=0.2)).reused
        lost = tmp_path / "out" / name
        shutil.rmtree(lost) if lost.is_dir() else os.truncate(lost, lost.stat().st_size // 2)
        with pytest.raises(UserError, match=rf"{name} is missing.*prepare CONFIG --force"):
            prepare(config(validation_fraction=0.2))
    again = prepare(config(validation_fraction=0.2), force=True)
    assert again.fingerprint == made.fingerprint


def test_a_changed_source_file_is_noticed(config, tmp_path):
    (tmp_path / "a.txt").write_text("one text")
    made = config(sources=[{"path": str(tmp_path / "a.txt")}])
    prepare(made)
    (tmp_path / "a.txt").write_text("another text")
    with pytest.raises(UserError, match="sources: was"):
        prepare(made)


def test_broken_entries_stop_or_are_skipped_and_kept_on_record(config, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "fine"}\n{"text": ""}\nbroken\n')
    sources = [{"path": str(tmp_path / "rows.jsonl")}]
    with pytest.raises(UserError, match=r"rows.jsonl:2: empty document\n.*rows.jsonl:3: broken"):
        prepare(config(sources=sources))
    assert not (tmp_path / "out").exists()
    report = prepare(config(sources=sources, on_error="skip"))
    assert report.problems == {"empty document": 1, "broken JSON": 1} and report.documents == 1
    lines = (tmp_path / "out" / "problems.jsonl").read_text().splitlines()
    assert [json.loads(line)["location"].rsplit(":", 1)[1] for line in lines] == ["2", "3"]


def test_problems_stop_the_training_of_a_tokenizer_too(config, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "fine"}\nbroken\n')
    sources = [{"path": str(tmp_path / "rows.jsonl")}]
    own = {"sources": sources, "tokenizer": None, "train_tokenizer": {"vocab_size": 300}}
    with pytest.raises(UserError, match=r"rows.jsonl:2: broken JSON"):
        prepare(config(**own))
    assert prepare(config(**own, on_error="skip")).problems == {"broken JSON": 1}


def test_nothing_to_learn_from_is_an_error(config, tmp_path):
    (tmp_path / "rows.jsonl").write_text("broken\n")
    sources = [{"path": str(tmp_path / "rows.jsonl")}]
    with pytest.raises(
        UserError, match=r"hold no document; skipped: 1 entry\s+\S+rows.jsonl:1: broken"
    ):
        prepare(config(sources=sources, on_error="skip"))
    with pytest.raises(UserError, match=r"no window \(train\): none of its 45 documents"):
        prepare(config(min_document_tokens=10_000))
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_larger_than_the_model_is_refused(config, tmp_path):
    small = config().model_copy(
        update={"model": config().model.model_copy(update={"scratch": {"vocab_size": 100}})}
    )
    with pytest.raises(UserError, match="280 tokens, the model's vocabulary 100"):
        prepare(small)
    assert not (tmp_path / "out").exists()
    prepare(config())
    with pytest.raises(UserError, match="280 tokens, the model's vocabulary 100"):
        prepare(small)


def test_windows_are_prepared_beside_the_corpus_neither_in_it_nor_around_it(
    config, corpus, tmp_path
):
    source = [{"path": str(corpus / "code"), "name": "code"}]
    for path in (corpus / "code" / "windows", corpus / "code" / "a" / ".." / "windows", corpus):
        with pytest.raises(UserError, match=r"lie one in the other|is no prepared folder"):
            prepare(config(path=str(path), sources=source))
    prepare(config(sources=source))
    inside = tmp_path / "out" / "more.jsonl"
    inside.write_text(json.dumps({"text": "a text"}) + "\n")
    with pytest.raises(UserError, match=r"data.sources\[0\].path .* lie one in the other"):
        prepare(config(sources=[{"path": str(inside), "name": "more"}]), force=True)
    assert inside.is_file()


def test_a_damaged_config_of_the_model_is_named(config, tmp_path):
    (tmp_path / "config.json").write_text("{broken")
    model = config().model.model_copy(update={"scratch": None, "path": str(tmp_path)})
    with pytest.raises(UserError, match=r"config.json is damaged .*Expecting"):
        prepare(config().model_copy(update={"model": model}))


def test_a_folder_of_something_else_is_never_replaced(config, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="exists and is no prepared folder"):
        prepare(config(), force=True)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "precious"


def test_the_command_prints_and_writes_the_account(config, tmp_path):
    save_config(config(), tmp_path / "config.yaml")
    arguments = ["prepare", str(tmp_path / "config.yaml"), "--json", str(tmp_path / "r.json")]
    result = CliRunner().invoke(group, [*arguments, "--png", str(tmp_path / "lengths.png")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "lengths.png").stat().st_size > 10_000
    assert all(text in result.output for text in ("tokens, at least", "dropped", "median"))
    report = json.loads((tmp_path / "r.json").read_text())
    assert f"{report['tokens_in']:,}" in result.output and "prose" in result.output
    assert report["windows"] == len(WindowDataset(tmp_path / "out"))
    again = CliRunner().invoke(group, arguments)
    assert again.exit_code == 0 and "already holds these windows" in again.output
    other = CliRunner().invoke(group, [*arguments, "data.window_tokens=32"])
    assert other.exit_code == 2 and "--force" in other.output
    forced = CliRunner().invoke(group, [*arguments, "data.window_tokens=32", "--force"])
    assert forced.exit_code == 0


def test_the_standard_library_becomes_windows(config):
    sources = [{"kind": "stdlib", "name": "python", "pattern": "json/*"}]
    own = {"sources": sources, "tokenizer": None, "train_tokenizer": {"vocab_size": 400}}
    report = prepare(config(**own, window_tokens=2048))
    assert report.sources["python/code"].documents >= 4 and report.vocab_size == 400
    assert report.windows > 3 and report.utilisation > 0.8
