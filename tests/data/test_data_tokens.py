"""Parts of tokenised documents: read back as written, continued, whatever their number."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anchorcontext.data import tokens
from anchorcontext.data.encode import EncodedChunk
from anchorcontext.data.sources import Problem
from anchorcontext.data.tokens import PartWriter, TokenisedCorpus, complete_parts


def chunk(*documents, source="web", problems=()):
    """A chunk of documents given as lists of ids."""
    ids = [np.array(part, dtype=np.int32) for part in documents]
    return EncodedChunk(
        sources=[source] * len(ids),
        names=[f"{source}:{len(part)}" for part in ids],
        lengths=np.array([len(part) for part in ids], dtype=np.int64),
        hashes=np.arange(len(ids), dtype=np.uint64) + np.uint64(1 << 63),
        ids=np.concatenate([np.zeros(0, dtype=np.int32), *ids]),
        problems=list(problems),
        rendered_anchors=1,
        rendered_documents=1,
        eos_added=2,
        size=10,
    )


CHUNKS = [
    chunk([1, 2, 3], [], [4], problems=[Problem("web", "a:1", "empty document")]),
    chunk(source="books"),
    chunk([5, 6], source="books"),
    chunk([7], [8, 9, 10]),
]


def write(folder, chunks, part_tokens, finish=True):
    writer = PartWriter(folder, part_tokens)
    for number, part in enumerate(chunks):
        writer.add(part, (writer.num_parts, number))
    if finish:
        writer.finish()
    return writer


@pytest.mark.parametrize(("part_tokens", "parts"), [(1, 4), (3, 3), (100, 1)])
def test_documents_come_back_from_any_parts(tmp_path, part_tokens, parts):
    write(tmp_path, CHUNKS, part_tokens)
    assert len(complete_parts(tmp_path)) == parts
    corpus = TokenisedCorpus(tmp_path)
    assert corpus.lengths.tolist() == [3, 0, 1, 2, 1, 3]
    assert [corpus.source_names[i] for i in corpus.sources] == ["web"] * 3 + ["books"] + ["web"] * 2
    assert corpus.ids(0, 1, 2).tolist() == [2, 3] and corpus.ids(5, 0, 3).tolist() == [8, 9, 10]
    assert corpus.hashes[2] == np.uint64((1 << 63) + 2)
    ((sources, names, lengths),) = corpus.rows()
    assert names.to_pylist()[3:] == ["books:2", "web:1", "web:3"]
    assert sources.to_pylist()[3] == "books" and lengths.tolist() == corpus.lengths.tolist()
    problems = [problem for _, some in complete_parts(tmp_path) for problem in some]
    assert problems == [Problem("web", "a:1", "empty document")]


def test_what_is_not_in_a_complete_part_does_not_count(tmp_path):
    write(tmp_path, CHUNKS[:3], part_tokens=4, finish=False)
    (tmp_path / "part-00001.arrow").write_bytes(b"half")
    writer = PartWriter(tmp_path, 4)
    assert writer.num_parts == 1 and writer.progress.after == (0, 0)
    assert writer.progress.documents == 3 and not writer.progress.complete
    for part in CHUNKS[1:]:
        writer.add(part, ())
    writer.finish()
    assert TokenisedCorpus(tmp_path).lengths.tolist() == [3, 0, 1, 2, 1, 3]
    progress, _ = complete_parts(tmp_path)[-1]
    assert progress.complete and progress.tokens == 10 and progress.size == 40
    assert (progress.rendered_anchors, progress.eos_added) == (4, 8)


def test_a_part_is_written_when_its_time_is_up(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "PART_SECONDS", -1.0)
    assert write(tmp_path, CHUNKS, 1 << 20, finish=False).num_parts == len(CHUNKS)


def test_more_documents_than_a_batch_of_the_table_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "DOCUMENT_ROWS", 4)
    write(tmp_path, CHUNKS, part_tokens=3)
    batches = list(TokenisedCorpus(tmp_path).rows())
    assert [len(lengths) for _, _, lengths in batches] == [4, 2]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=4), max_size=6), st.data()
)
def test_ids_are_those_of_the_documents(tmp_path_factory, chunks, data):
    folder = tmp_path_factory.mktemp("parts")
    write(folder, [chunk(*documents) for documents in chunks], data.draw(st.integers(1, 9)))
    corpus = TokenisedCorpus(folder)
    documents = [document for part in chunks for document in part]
    assert corpus.lengths.tolist() == [len(document) for document in documents]
    for number, document in enumerate(documents):
        start = data.draw(st.integers(0, len(document)))
        found = corpus.ids(number, start, len(document) - start)
        assert found.tolist() == document[start:]
