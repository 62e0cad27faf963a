"""Documents to token ids, in this process or in others; the same ids whoever does it.

Documents are encoded without special tokens, whatever the tokenizer adds by itself: the one
leading token of a window is the anchor, which packing puts there. Names of special tokens that
occur in a text become those tokens, as everywhere in transformers.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing import connection, get_context, parent_process
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UserError
from .sources import Chunk, Document, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOO_LONG = "longer than data.max_document_characters"
FOREIGN_ID = "token id outside the vocabulary"
# Chunks that wait for a worker or for their turn, a worker: what bounds the memory.
CHUNKS_PER_WORKER = 3


class Encoder:
    """Texts to token ids; travels to other processes.

    Anchors in front of a document, as when its text was rendered with BOS, are taken away: the
    anchor stands once, in front of the window. ``num_rendered_anchors`` counts them. ``add_eos``
    ends every text with EOS, unless it ends with it already; ``num_eos_added`` counts those.

    Raises:
        UserError: ``add_eos`` with a tokenizer that has no EOS.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        anchor_id: int | None,
        add_eos: bool,
        max_characters: int | None = None,
    ) -> None:
        eos = tokenizer.eos_token_id
        if add_eos and eos is None:
            raise UserError("data.add_eos: the tokenizer has no EOS token; set data.add_eos=false")
        self._eos = int(eos) if add_eos and eos is not None else None
        self._anchor_id = anchor_id
        # A worker loads the tokenizers package alone; slow tokenizers need transformers there too.
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._slow = tokenizer if self._backend is None else None
        self.vocab_size = len(tokenizer)
        self.max_characters = max_characters
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        self.num_rendered_anchors = 0
        self.num_eos_added = 0

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The token ids of each text, int32 (n,); the same whatever the number of threads."""
        return [self._end(self.adopt(np.array(ids, dtype=np.int32))) for ids in self._ids(texts)]

    def adopt(self, ids: np.ndarray) -> np.ndarray:
        """``ids`` of a document that was tokenised elsewhere, without anchors in front."""
        if self._anchor_id is None or not len(ids) or ids[0] != self._anchor_id:
            return ids
        others = np.flatnonzero(ids != self._anchor_id)
        first = int(others[0]) if len(others) else len(ids)
        self.num_rendered_anchors += first
        return ids[first:]

    def _ids(self, texts: Sequence[str]) -> Iterable[list[int]]:
        if self._slow is not None:
            return (self._slow.encode(text, add_special_tokens=False) for text in texts)
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return (encoding.ids for encoding in encodings)

    def _end(self, ids: np.ndarray) -> np.ndarray:
        if self._eos is None or not len(ids) or ids[-1] == self._eos:
            return ids
        self.num_eos_added += 1
        return np.append(ids, np.int32(self._eos))


@dataclass(frozen=True)
class EncodedChunk:
    """The D documents of one chunk: ``ids`` int32, one document after the other; ``lengths``
    int64 (D,); ``hashes`` uint64 (D,) of their content."""

    sources: list[str]
    names: list[str]
    lengths: np.ndarray
    hashes: np.ndarray
    ids: np.ndarray
    problems: list[Problem]
    rendered_anchors: int
    """Tokens that were taken away in front of documents."""
    rendered_documents: int
    """Documents that lost such tokens."""
    eos_added: int
    size: int


def encode_chunk(encoder: Encoder, chunk: Chunk) -> EncodedChunk:
    """All documents of a chunk, tokenised; its problems, in order."""
    documents: list[Document] = []
    problems: list[Problem] = []
    for item in chunk.items():
        problem = item if isinstance(item, Problem) else _refuse(encoder, item)
        if problem is not None:
            problems.append(problem)
        elif isinstance(item, Document):
            documents.append(item)
    anchors, eos = encoder.num_rendered_anchors, encoder.num_eos_added
    texts = iter(encoder.encode([document.text for document in documents if document.ids is None]))
    ids, rendered = [], 0
    for document in documents:
        before = encoder.num_rendered_anchors
        ids.append(next(texts) if document.ids is None else encoder.adopt(document.ids))
        rendered += encoder.num_rendered_anchors > before
    return EncodedChunk(
        sources=[document.source for document in documents],
        names=[document.name for document in documents],
        lengths=np.array([len(part) for part in ids], dtype=np.int64),
        hashes=np.array([content_hash(document) for document in documents], dtype=np.uint64),
        ids=np.concatenate([np.zeros(0, dtype=np.int32), *ids]),
        problems=problems,
        rendered_anchors=encoder.num_rendered_anchors - anchors,
        rendered_documents=rendered,
        eos_added=encoder.num_eos_added - eos,
        size=chunk.size,
    )


def content_hash(document: Document) -> int:
    """64 bits of a document's content alone: not of its name, source, place or tokenizer."""
    content = document.text.encode("utf-8") if document.ids is None else document.ids.tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _refuse(encoder: Encoder, document: Document) -> Problem | None:
    """Why a document cannot be tokenised, or taken as tokens of this tokenizer."""
    limit, length = encoder.max_characters, len(document.text)
    place = f"{document.source}/{document.name}"
    if limit is not None and length > limit:
        return Problem(document.source, place, TOO_LONG, f"{length} of {limit}")
    if document.ids is not None and int(document.ids.max()) >= encoder.vocab_size:
        detail = f"{int(document.ids.max())} of {encoder.vocab_size}"
        return Problem(document.source, place, FOREIGN_ID, detail)
    return None


def encode_chunks(
    encoder: Encoder, chunks: Iterable[Chunk], workers: int
) -> Iterator[EncodedChunk]:
    """Chunks encoded by ``workers`` processes, given back in their own order.

    No more than ``CHUNKS_PER_WORKER`` a worker are read ahead. A single worker, or a single chunk,
    is encoded in this process.

    Raises:
        UserError: the system ended a worker.
    """
    chunks = iter(chunks)
    first = list(islice(chunks, 2))
    if workers == 1 or len(first) < 2:
        yield from (encode_chunk(encoder, chunk) for chunk in chain(first, chunks))
        return
    # Spawned, not forked: this process may run threads (Arrow's, the tokenizer's, torch's).
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (encoder,))
    waiting: deque[Future[EncodedChunk]] = deque()
    try:
        for chunk in chain(first, chunks):
            waiting.append(pool.submit(_encode_in_worker, chunk))
            if len(waiting) >= CHUNKS_PER_WORKER * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            f"a tokenising process was ended by the system, mostly for lack of memory; set "
            f"data.workers lower than {workers}, or data.max_document_characters, and run prepare "
            "again: it continues"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker_encoder: Encoder | None = None


def _start_worker(encoder: Encoder) -> None:
    global _worker_encoder
    _worker_encoder = encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that was killed cannot stop its workers, and they would wait for ever."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _encode_in_worker(chunk: Chunk) -> EncodedChunk:
    assert _worker_encoder is not None
    return encode_chunk(_worker_encoder, chunk)
