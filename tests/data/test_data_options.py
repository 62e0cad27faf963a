"""The options of packing through ``prepare``: what is in the windows, what training sees of it."""

import json

import numpy as np
import pytest

from anchorcontext.config import parse_config
from anchorcontext.data import WindowDataset, load_tokenizer, prepare, train_tokenizer
from anchorcontext.errors import UserError

SHORT = [f"Short text {i}, and more of it. " * (1 + i % 4) for i in range(60)]
LONG = [f"A long story, number {i}. " * (30 + i) for i in range(8)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("options")
    for name, texts in {"web": SHORT, "books": LONG}.items():
        rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text(rows)
    train_tokenizer(SHORT + LONG, 280).save_pretrained(folder / "tokenizer")
    return folder


@pytest.fixture
def prepared(corpus, tmp_path):
    """Prepare the corpus with options; the report and the windows of a split."""

    def run(split="train", path="out", mode="full", **data):
        values = {
            "path": str(tmp_path / path),
            "sources": [{"path": str(corpus / f"{name}.jsonl")} for name in ("web", "books")],
            "tokenizer": str(corpus / "tokenizer"),
            "window_tokens": 256,
            "workers": 1,
            **data,
        }
        config = parse_config(
            {
                "run": {"name": "test"},
                "model": {"scratch": {"model_type": "llama", "vocab_size": 512}},
                "data": values,
                "attention": {"mode": mode},
                "train": {"steps": 1, "windows_per_step": 1},
            }
        )
        report = prepare(config, force=True)
        return report, WindowDataset(report.path, split)

    return run


def documents_of(dataset):
    """{document: its tokens} put together from all windows, each token once."""
    found = {}
    for record in dataset:
        for begin, end, document, start, tag in zip(
            record.cu_seqlens[:-1].tolist(),
            record.cu_seqlens[1:].tolist(),
            record.documents.tolist(),
            record.starts.tolist(),
            record.tags.tolist(),
            strict=True,
        ):
            if document < 0 or start < 0:
                continue
            ids = record.input_ids[begin + tag : end].tolist()
            places = found.setdefault(document, {})
            assert not set(places) & set(range(start, start + len(ids)))
            places.update(zip(range(start, start + len(ids)), ids, strict=True))
    return {document: [places[i] for i in sorted(places)] for document, places in found.items()}


OPTIONS = [
    {"packing": {"method": "best_fit"}},
    {"packing": {"method": "best_fit", "max_truncation": 0.2}},
    {"tags": "<{source}> "},
    {"anchor_copies": "segments"},
    {"anchor_copies": "documents", "packing": {"method": "best_fit"}},
    {"interleave": {"tokens": [8, 200]}},
    {"interleave": {"tokens": [8, 200]}, "tags": "{source}:", "anchor_copies": "documents"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_every_document_is_in_the_windows_once(prepared, options):
    report, dataset = prepared(**options)
    assert report.tokens_in == report.tokens_kept and not report.dropped
    tokenizer = load_tokenizer(dataset.tokenizer_path)
    found = documents_of(dataset)
    for number, text in enumerate(SHORT + LONG):
        assert tokenizer.decode(found[number][:-1]) == text
    assert all(len(record.input_ids) <= 256 for record in dataset)
    assert 0.85 < report.utilisation <= 1


def test_tags_name_the_source_and_are_seen_but_never_predicted(prepared):
    _, dataset = prepared(tags="<{source}> ")
    tokenizer = load_tokenizer(dataset.tokenizer_path)
    seen = set()
    for record in dataset:
        window = record.window("anchor", boundary="train")
        for begin, document, tag in zip(
            record.cu_seqlens[1:-1].tolist(),
            record.documents[1:].tolist(),
            record.tags[1:].tolist(),
            strict=True,
        ):
            text = tokenizer.decode(window.input_ids[begin : begin + tag].tolist())
            assert text == f"<{dataset.document(document).source}> "
            assert (window.labels[begin - 1 : begin + tag - 1] == -100).all()
            assert window.labels[begin + tag - 1] == window.input_ids[begin + tag]
            seen.add(text)
    assert seen == {"<web> ", "<books> "}
    assert dataset[0].window("anchor", "train").loss_mask.sum() < 256


@pytest.mark.parametrize("copies", ["documents", "segments"])
def test_copies_stand_in_front_of_documents_instead_of_the_window(prepared, copies):
    _, dataset = prepared(anchor_copies=copies, mode="intra_doc")
    continued = 0
    for record in dataset:
        is_copy = record.starts == -1
        follows = np.flatnonzero(is_copy) + 1
        assert (record.input_ids[record.cu_seqlens[:-1][is_copy]] == dataset.anchor_id).all()
        assert (record.documents[follows] == record.documents[follows - 1]).all()
        runs = np.flatnonzero(~is_copy)
        assert set(follows.tolist()) <= set(runs.tolist())
        has_copy = np.isin(runs, follows)
        begins = record.starts[runs] == 0
        assert (has_copy == (begins | (copies == "segments"))).all()
        continued += (~begins).sum()
        window = record.window("intra_doc")
        if is_copy.any():
            assert (window.position_ids[window.anchor_copies] == 0).all()
        assert len(np.unique(window.segment_docs)) == len(runs)
    assert continued > 5
    with pytest.raises(UserError, match="copies of the anchor in mode 'anchor'"):
        dataset[0].window("anchor")


def test_interleaved_pieces_are_one_document_of_the_window(prepared):
    _, dataset = prepared(interleave={"tokens": [8, 200]}, packing={"method": "best_fit"})
    scattered = 0
    for record in dataset:
        window = record.window("anchor")
        for document in np.unique(record.documents[1:]):
            runs = np.flatnonzero(record.documents == document)
            assert len(set(window.segment_docs[runs].tolist())) == 1
            assert (np.diff(record.starts[runs]) > 0).all()
            scattered += len(runs) > 1
        assert len(np.unique(window.segment_docs)) == len(np.unique(record.documents))
    assert scattered > 30


def test_a_document_in_pieces_has_one_copy_and_one_tag_in_a_window(prepared):
    _, dataset = prepared(
        interleave={"tokens": [8, 200]}, anchor_copies="segments", tags="{source}:", mode="full"
    )
    for record in dataset:
        copied = record.documents[record.starts == -1]
        tagged = record.documents[record.tags > 0]
        assert sorted(copied) == sorted(tagged) == np.unique(record.documents).tolist()


def test_upsampling_keeps_shares_and_counts_what_it_drops(prepared):
    report, _ = prepared(upsample={"below": 100, "keep": 0.2})
    assert report.tokens_in == report.tokens_kept + report.dropped["upsample"].tokens
    shares = {name: part.kept / part.tokens for name, part in report.sources.items()}
    assert shares["web"] == pytest.approx(0.2, rel=0.005)
    assert shares["books"] == pytest.approx(0.2, rel=0.005)


def test_held_out_documents_are_packed_as_they_are(prepared):
    options = {"upsample": {"below": 100, "keep": 0.2}, "interleave": True, "tags": "{source}:"}
    report, held_out = prepared(
        "validation", validation_fraction=0.3, packing={"min_fill": 1.0}, **options
    )
    assert report.validation.windows == len(held_out) and report.validation.tokens > 0
    for record in held_out:
        assert len(np.unique(record.documents)) == len(record.documents)
        assert (record.tags[1:] > 0).all()


def test_all_options_together_do_not_depend_on_workers(prepared):
    options = {
        "packing": {"method": "best_fit", "max_truncation": 0.1},
        "upsample": {"below": 100, "keep": 0.5},
        "tags": "{source}: ",
        "interleave": {"tokens": [8, 200]},
        "shuffle_documents": True,
    }
    first, second, other = (
        prepared(path=name, **options, **change)[0].fingerprint
        for name, change in {"a": {}, "b": {"workers": 2}, "c": {"seed": 1}}.items()
    )
    assert first == second != other


def test_a_tag_that_fills_the_window_is_refused(prepared):
    with pytest.raises(UserError, match=r"at least the anchor and \d+ tokens in front"):
        prepared(tags="{source}" + " is where this comes from" * 30)
