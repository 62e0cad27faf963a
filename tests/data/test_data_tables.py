"""Parquet, Arrow and ``datasets`` folders give the documents that JSON lines would give."""

import itertools
import json
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anchorcontext.config.sections import SourceSection
from anchorcontext.data.sources import ProblemLog, open_source, read_documents
from anchorcontext.errors import UserError

ROWS = [
    {"text": f"text {i}", "meta": {"set": "web" if i % 3 else "books"}, "n": i} for i in range(50)
]


def entry(path, **options):
    return SourceSection(name="corpus", path=str(path), **options)


def read(source, on_error="stop"):
    log = ProblemLog(on_error)
    return list(read_documents([source], log)), log


def write_parquet(path, rows=ROWS):
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=20)
    return path


@pytest.fixture
def saved(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one", num_shards=2)
    splits = {"train": datasets.Dataset.from_list(ROWS[:5])}
    splits["test"] = datasets.Dataset.from_list(ROWS[5:])
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "several")
    return tmp_path


def test_every_format_gives_the_same_texts_and_sources(tmp_path, saved):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    write_parquet(tmp_path / "rows.parquet")
    expected, _ = read(open_source(entry(tmp_path / "rows.jsonl", source_field="meta.set")))
    assert {document.source for document in expected} == {"corpus/web", "corpus/books"}
    for path in ("rows.parquet", "one"):
        documents, log = read(open_source(entry(tmp_path / path, source_field="meta.set")))
        assert [(d.source, d.text) for d in documents] == [(d.source, d.text) for d in expected]
        assert log.problems == []
    assert read(open_source(entry(tmp_path / "rows.parquet")))[0][21].name == "rows.parquet:21"


def test_splits_of_a_saved_folder(saved):
    documents, _ = read(open_source(entry(saved / "several", split="test")))
    assert [document.text for document in documents] == [row["text"] for row in ROWS[5:]]
    with pytest.raises(UserError, match="has the splits train, test"):
        open_source(entry(saved / "several", split="dev"))


@pytest.mark.parametrize("streaming", [False, True])
def test_load_dataset_opens_a_folder_and_goes_on_after_a_chunk(tmp_path, monkeypatch, streaming):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write_parquet(tmp_path / "data" / "train.parquet")
    source = open_source(entry(tmp_path / "data", kind="datasets", streaming=streaming))
    documents, _ = read(source)
    assert [document.text for document in documents] == [row["text"] for row in ROWS]
    again = open_source(entry(tmp_path / "data", kind="datasets", streaming=streaming))
    assert source.digest() == again.digest()
    chunks = list(source.chunks((), 300))
    assert len(chunks) > 3
    for chunk, following in itertools.pairwise(chunks):
        again = next(iter(source.chunks(chunk.after, 300)))
        first = next(item.text for item in following.items())
        assert next(iter(again.items())).text == first
    with pytest.raises(UserError, match="no column 'body', but text"):
        open_source(
            entry(tmp_path / "data", kind="datasets", streaming=streaming, text_field="body")
        ).digest()


def test_a_stream_that_breaks_off_ends_the_run_whatever_on_error_says(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write_parquet(tmp_path / "data" / "train.parquet")
    source = open_source(entry(tmp_path / "data", kind="datasets", streaming=True))

    class Breaking(type(source._dataset)):
        def iter(self, batch_size):
            yield next(super().iter(2))
            raise ConnectionResetError("the network is gone")

    source._dataset.__class__ = Breaking
    with pytest.raises(UserError, match=r"broke off at row 2 .*the network is gone.*again"):
        read(source, "skip")


def test_what_load_dataset_cannot_open_is_named(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"load_dataset.*failed"):
        open_source(entry(tmp_path / "empty", kind="datasets")).digest()


@pytest.mark.parametrize("chunk_bytes", [1, 500, 1 << 20])
@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_chunks_of_tables_go_on_where_one_ends(tmp_path, name, chunk_bytes):
    if name.endswith("parquet"):
        write_parquet(tmp_path / name)
    else:
        table = pa.Table.from_pylist(ROWS)
        with pa.ipc.new_file(tmp_path / name, table.schema) as writer:
            writer.write_table(table, max_chunksize=20)
    source = open_source(entry(tmp_path / name))
    chunks = list(source.chunks((), chunk_bytes))
    texts = [item.text for chunk in chunks for item in chunk.items()]
    assert texts == [row["text"] for row in ROWS]
    for number, chunk in enumerate(chunks):
        rest = [c.data for c in source.chunks(chunk.after, chunk_bytes)]
        assert rest == [c.data for c in chunks[number + 1 :]]


@pytest.mark.parametrize("kind", ["rows.parquet", "rows.arrow", "datasets"])
def test_what_travels_to_a_worker_is_the_chunk_not_its_table(tmp_path, kind):
    table = pa.table({"text": ["x" * 1000] * 100})
    pq.write_table(table, tmp_path / "rows.parquet")
    with pa.ipc.new_stream(tmp_path / "rows.arrow", table.schema) as writer:
        writer.write_table(table)
    if kind == "datasets":
        datasets = pytest.importorskip("datasets")
        datasets.Dataset(table).to_parquet(tmp_path / "hub" / "train.parquet")
        source = open_source(entry(tmp_path / "hub", kind="datasets", streaming=True))
    else:
        source = open_source(entry(tmp_path / kind))
    chunks = list(source.chunks((), 5000))
    assert len(chunks) >= 20 and all(len(pickle.dumps(chunk)) < 7000 for chunk in chunks)
    assert [len(list(chunk.items())) for chunk in chunks[:-1]] == [4] * (len(chunks) - 1)


def test_an_arrow_stream_that_ends_too_early_is_named(tmp_path):
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(tmp_path / "rows.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=20)
    source = open_source(entry(tmp_path / "rows.arrow"))
    assert len(read(source)[0]) == 50
    data = (tmp_path / "rows.arrow").read_bytes()
    for size in (len(data) - 8, len(data) // 2):
        (tmp_path / "rows.arrow").write_bytes(data[:size])
        documents, log = read(source, "skip")
        assert [problem.kind for problem in log.problems] == ["unreadable file"]
        assert log.problems[0].location == f"{tmp_path}/rows.arrow:{len(documents)}"


def test_broken_tables_are_named(tmp_path):
    good = write_parquet(tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(good.read_bytes()[:200])
    (tmp_path / "c.parquet").write_bytes(b"")
    write_parquet(tmp_path / "d.parquet", [{"body": "x"}])
    write_parquet(tmp_path / "e.parquet", [{"text": None}, {"text": "fine"}, {"text": "a\0b"}])
    documents, log = read(open_source(entry(tmp_path)), "skip")
    assert [document.text for document in documents] == [*(row["text"] for row in ROWS), "fine"]
    assert [(problem.location, problem.kind) for problem in log.problems] == [
        (f"{tmp_path}/b.parquet:0", "unreadable file"),
        (f"{tmp_path}/c.parquet:0", "unreadable file"),
        (f"{tmp_path}/d.parquet:0", "no such column"),
        (f"{tmp_path}/e.parquet:0", "text is not a string"),
        (f"{tmp_path}/e.parquet:2", "NUL character"),
    ]
    assert log.problems[2].detail == "'text', but body"


def test_a_flipped_bit_in_a_page_is_no_text(tmp_path):
    file = tmp_path / "a.parquet"
    texts = [f"text number {number}" for number in range(50)]
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pq.write_table(pa.table({"text": texts}), file, **options)
    data = bytearray(file.read_bytes())
    data[data.index(b"number 25") + 3] ^= 1
    file.write_bytes(data)
    documents, log = read(open_source(entry(file)), "skip")
    assert not documents and [problem.kind for problem in log.problems] == ["unreadable file"]


# Rows as the length-upsampling recipe writes them: documents one after the other, each span with
# its source, the last one cut at the row's end.
ROW = {
    "input_ids": list(range(10, 40)),
    "labels": 40,
    "source": [
        {"source": "C4", "start": 0, "end": 12},
        {"source": "Book", "start": 12, "end": 30},
    ],
}


def write_rows(tmp_path, container, rows):
    if container == "jsonl":
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path
    return write_parquet(tmp_path / "rows.parquet", rows)


@pytest.mark.parametrize("container", ["jsonl", "parquet"])
@pytest.mark.parametrize("length", [131_072, 256_001])
def test_all_of_a_tokenised_row_is_used(tmp_path, container, length):
    ids = np.random.default_rng(0).integers(0, 32_000, length)
    spans = [{"source": "C4", "start": 0, "end": 70_000}]
    spans += [{"source": "Book", "start": 70_000, "end": length}]
    row = {"input_ids": ids.tolist(), "labels": 7, "source": spans}
    path = write_rows(tmp_path, container, [row, ROW])
    documents, log = read(open_source(entry(path, tokens_field="input_ids")))
    assert [d.source for d in documents] == ["corpus/C4", "corpus/Book"] * 2
    assert np.array_equal(np.concatenate([d.ids for d in documents[:2]]), ids)
    assert [d.ids.tolist() for d in documents[2:]] == [list(range(10, 22)), list(range(22, 40))]
    assert documents[1].name.endswith(f"[70000:{length}]") and documents[1].ids.dtype == np.int32
    assert log.problems == []


@pytest.mark.parametrize("container", ["jsonl", "parquet"])
def test_tokens_outside_spans_are_documents_too(tmp_path, container):
    row = {**ROW, "source": [{"source": "C4", "start": 4, "end": 12}]}
    path = write_rows(tmp_path, container, [row])
    documents, _ = read(open_source(entry(path, tokens_field="input_ids")))
    assert [(d.source, len(d.ids)) for d in documents] == [
        ("corpus", 4),
        ("corpus/C4", 8),
        ("corpus", 18),
    ]
    (whole,), _ = read(
        open_source(entry(write_rows(tmp_path, container, [{"ids": [1, 2]}]), tokens_field="ids"))
    )
    assert whole.ids.tolist() == [1, 2] and whole.source == "corpus"


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"input_ids": "text"}, "no token ids"),
        ({"input_ids": [1, -2]}, "no token ids"),
        ({"input_ids": [1, 1 << 40]}, "no token ids"),
        ({"input_ids": [1.5]}, "no token ids"),
        ({"input_ids": [[1], [2]]}, "no token ids"),
        ({"input_ids": []}, "empty document"),
        ({"source": [{"source": "C4", "start": 0, "end": 31}]}, "wrong spans"),
        ({"source": [{"source": "C4", "start": 5, "end": 5}]}, "wrong spans"),
        ({"source": [{"source": "C4", "start": 0}]}, "wrong spans"),
        (
            {"source": [{"source": n, "start": 0, "end": 9} for n in ("C4", "Book")]},
            "wrong spans",
        ),
    ],
)
def test_rows_that_are_no_tokens_are_named(tmp_path, change, kind):
    path = write_rows(tmp_path, "jsonl", [{**ROW, **change}, ROW])
    documents, log = read(open_source(entry(path, tokens_field="input_ids")), "skip")
    assert len(documents) == 2 and [p.kind for p in log.problems] == [kind]


def test_rows_without_the_source_field_are_named(tmp_path):
    path = write_rows(tmp_path, "jsonl", [{"text": "a", "meta": {}}, *ROWS[:2]])
    documents, log = read(open_source(entry(path, source_field="meta.set")), "skip")
    assert len(documents) == 2 and [p.kind for p in log.problems] == ["no source field"]
