"""Chunks in order from any number of processes; content hashes; ids that are none of ours."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from anchorcontext.data.encode import Encoder, content_hash, encode_chunk, encode_chunks
from anchorcontext.data.sources import Document
from anchorcontext.data.sources.text import FilesChunk
from anchorcontext.data.tokenizer import train_tokenizer
from anchorcontext.errors import UserError


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["some words and more words"] * 3, 262)


class Given:
    """A chunk of given documents."""

    after, size = (), 1

    def __init__(self, *documents):
        self.documents = documents

    def items(self):
        return iter(self.documents)


class Ending:
    """A chunk that ends its process, as the system does for lack of memory."""

    after, size = (), 1

    def items(self):
        os.kill(os.getpid(), signal.SIGKILL)


def files(folder, count):
    for i in range(count):
        (folder / f"{i}.txt").write_text(f"words {i} " * (count - i))
    return [
        FilesChunk("s", ((str(folder / f"{i}.txt"), str(i)),), 1, (i + 1,)) for i in range(count)
    ]


def test_results_keep_the_order_of_the_chunks(tokenizer, tmp_path):
    encoder = Encoder(tokenizer, tokenizer.bos_token_id, add_eos=True)
    chunks = files(tmp_path, 12)
    one, two = (list(encode_chunks(encoder, chunks, workers)) for workers in (1, 2))
    assert [chunk.names for chunk in two] == [[str(i)] for i in range(12)]
    for mine, other in zip(one, two, strict=True):
        assert mine.ids.tolist() == other.ids.tolist() and mine.eos_added == other.eos_added == 1
        assert mine.hashes.tolist() == other.hashes.tolist()


def test_a_worker_that_the_system_ends_is_named(tokenizer):
    encoder = Encoder(tokenizer, None, add_eos=False)
    with pytest.raises(UserError, match="tokenising process was ended by the system"):
        list(encode_chunks(encoder, [Ending()] * 3, workers=2))


ORPHANS = """
import sys, time
from anchorcontext.data.encode import Encoder, encode_chunks
from anchorcontext.data.tokenizer import train_tokenizer
from anchorcontext.data.sources.text import FilesChunk
encoder = Encoder(train_tokenizer(["a"], 262), None, False)
for result in encode_chunks(encoder, [FilesChunk("s", (), 1, ())] * 3, 2):
    import multiprocessing
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    time.sleep(600)
"""


def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    (tmp_path / "main.py").write_text(
        "if __name__ == '__main__':\n" + ORPHANS.replace("\n", "\n    ")
    )
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "main.py")], stdout=subprocess.PIPE, text=True
    )
    children = [int(pid) for pid in parent.stdout.readline().split()]
    assert children and all(os.path.exists(f"/proc/{pid}") for pid in children)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while any(_runs(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_runs(pid) for pid in children)


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_document_has_one_hash_wherever_it_lies():
    assert content_hash(Document("a", "1", "text")) == content_hash(Document("b", "2", "text"))
    assert content_hash(Document("a", "1", "text")) != content_hash(Document("a", "1", "text."))
    assert content_hash(Document("a", "1", "text")) == 2024992729630503895
    ids = np.array([1, 2], dtype=np.int32)
    assert content_hash(Document("a", "1", ids=ids)) != content_hash(Document("a", "1", "text"))


def test_tokenised_documents_are_taken_as_they_are_but_for_their_anchors(tokenizer):
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    encoder = Encoder(tokenizer, bos, add_eos=True)
    documents = [
        Document("s", "a", ids=np.array(ids, dtype=np.int32))
        for ids in ([bos, 9, bos, 8], [7], [bos, bos, 5], [eos], [bos])
    ]
    chunk = encode_chunk(encoder, Given(*documents[:2], Document("s", "t", "so"), *documents[2:]))
    assert chunk.lengths.tolist() == [3, 1, chunk.lengths[2], 1, 1, 0]
    assert chunk.ids[:4].tolist() == [9, bos, 8, 7] and chunk.ids[-2:].tolist() == [5, eos]
    assert (chunk.rendered_anchors, chunk.rendered_documents, chunk.eos_added) == (4, 3, 1)


def test_ids_of_another_vocabulary_and_endless_texts_are_problems(tokenizer):
    encoder = Encoder(tokenizer, None, add_eos=False, max_characters=10)
    foreign = Document("s", "a", ids=np.array([1, 262], dtype=np.int32))
    chunk = encode_chunk(
        encoder, Given(foreign, Document("s", "b", "x" * 11), Document("s", "c", "y"))
    )
    assert chunk.names == ["c"]
    assert [str(problem) for problem in chunk.problems] == [
        "s/a: token id outside the vocabulary (262 of 262)",
        "s/b: longer than data.max_document_characters (11 of 10)",
    ]
