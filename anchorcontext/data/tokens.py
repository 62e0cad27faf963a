"""Tokenised documents on disk while a folder is prepared: parts that are complete or not there.

::

    part-00000.arrow   one row a document: source, name, hash, input_ids
    part-00000.json    written last: it makes the part count, and says where the corpus goes on

Parts are written in the order of the corpus. A preparation that was killed goes on after its last
part; packing then reads all of them through one memory map each.
"""

from __future__ import annotations

import json
import os
import time
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa

from .encode import EncodedChunk
from .sources import Position, Problem

DOCUMENT_ROWS = 1 << 16
PART_TOKENS = 1 << 24  # 64 MiB of ids, kept in memory until they are written
PART_SECONDS = 30.0  # what a kill loses at most
SCHEMA = pa.schema(
    {
        "source": pa.dictionary(pa.int32(), pa.string()),
        "name": pa.string(),
        "hash": pa.uint64(),
        "input_ids": pa.list_(pa.int32()),
    }
)


@dataclass
class Progress:
    """What the parts so far hold, and where the corpus goes on."""

    after: Position = ()
    complete: bool = False
    documents: int = 0
    tokens: int = 0
    rendered_anchors: int = 0
    rendered_documents: int = 0
    eos_added: int = 0
    size: int = 0
    """Bytes of the corpus."""


@dataclass
class PartWriter:
    """Collects encoded chunks and writes a part of ``part_tokens``, or of ``PART_SECONDS``.

    It continues behind the complete parts of ``folder``. What is read from the parts does not
    depend on where one ends.
    """

    folder: Path
    part_tokens: int = PART_TOKENS
    num_parts: int = field(init=False)
    progress: Progress = field(init=False)

    def __post_init__(self) -> None:
        parts = complete_parts(self.folder)
        self.num_parts = len(parts)
        self.progress = parts[-1][0] if parts else Progress()
        self._chunks: list[EncodedChunk] = []
        self._tokens = 0
        self._written = time.monotonic()

    def add(self, chunk: EncodedChunk, after: Position) -> None:
        """Take the next chunk of the corpus, which goes on at ``after``."""
        self._chunks.append(chunk)
        self._tokens += len(chunk.ids)
        progress = self.progress
        progress.after = after
        progress.documents += len(chunk.lengths)
        progress.tokens += len(chunk.ids)
        progress.rendered_anchors += chunk.rendered_anchors
        progress.rendered_documents += chunk.rendered_documents
        progress.eos_added += chunk.eos_added
        progress.size += chunk.size
        late = time.monotonic() - self._written > PART_SECONDS
        if self._tokens >= self.part_tokens or late:
            self._write()

    def finish(self) -> None:
        """Write the last part; the corpus is complete."""
        self.progress.complete = True
        self._write()

    def _write(self) -> None:
        path = self.folder / f"part-{self.num_parts:05d}.arrow"
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, SCHEMA) as writer:
            writer.write_batch(_record_batch(self._chunks))
        problems = [asdict(problem) for chunk in self._chunks for problem in chunk.problems]
        state = {"progress": asdict(self.progress), "problems": problems}
        beside = path.with_suffix(".json.part")
        beside.write_text(json.dumps(state), encoding="utf-8")
        for written in (path, beside):
            sync(written)
        beside.replace(path.with_suffix(".json"))
        self.num_parts += 1
        self._chunks, self._tokens = [], 0
        self._written = time.monotonic()


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def complete_parts(folder: Path) -> list[tuple[Progress, list[Problem]]]:
    """Of every complete part, in order: the progress up to its end, and its own problems."""
    parts: list[tuple[Progress, list[Problem]]] = []
    while (file := folder / f"part-{len(parts):05d}.json").is_file():
        state = json.loads(file.read_text(encoding="utf-8"))
        progress = Progress(**{**state["progress"], "after": tuple(state["progress"]["after"])})
        parts.append((progress, [Problem(**problem) for problem in state["problems"]]))
    return parts


def _record_batch(chunks: list[EncodedChunk]) -> pa.RecordBatch:
    """All documents of ``chunks`` as one record batch of ``SCHEMA``."""
    lengths = np.concatenate([np.zeros(0, dtype=np.int64), *(chunk.lengths for chunk in chunks)])
    ids = np.concatenate([np.zeros(0, dtype=np.int32), *(chunk.ids for chunk in chunks)])
    hashes = np.concatenate([np.zeros(0, dtype=np.uint64), *(chunk.hashes for chunk in chunks)])
    sources = pa.array([name for chunk in chunks for name in chunk.sources], pa.string())
    columns = [
        sources.dictionary_encode(),
        pa.array([name for chunk in chunks for name in chunk.names], pa.string()),
        pa.array(hashes),
        pa.ListArray.from_arrays(np.r_[0, np.cumsum(lengths)].astype(np.int32), pa.array(ids)),
    ]
    return pa.record_batch(columns, schema=SCHEMA)


class TokenisedCorpus:
    """The D documents of all parts of a folder, in the order of the corpus.

    ``lengths`` int64 (D,): tokens; ``sources`` int32 (D,): indices into ``source_names``, which are
    in order of first appearance; ``hashes`` uint64 (D,) of each document's content.
    """

    def __init__(self, folder: Path) -> None:
        count = len(complete_parts(folder))
        self._batches = [_read(folder / f"part-{index:05d}.arrow") for index in range(count)]
        ids = [batch.column("input_ids") for batch in self._batches]
        self._offsets = [column.offsets.to_numpy() for column in ids]
        self._values = [column.values.to_numpy() for column in ids]
        self._ends = list(accumulate(batch.num_rows for batch in self._batches))
        self.lengths = np.concatenate(
            [np.zeros(0, dtype=np.int64), *(np.diff(o).astype(np.int64) for o in self._offsets)]
        )
        hashes = [batch.column("hash").to_numpy() for batch in self._batches]
        self.hashes = np.concatenate([np.zeros(0, dtype=np.uint64), *hashes])
        index: dict[str, int] = {}
        numbers = [np.zeros(0, dtype=np.int32)]
        for batch in self._batches:
            column = batch.column("source")
            names = column.dictionary.to_pylist()
            mine = np.array([index.setdefault(name, len(index)) for name in names], dtype=np.int32)
            numbers.append(mine[column.indices.to_numpy()])
        self.sources = np.concatenate(numbers)
        self.source_names = list(index)

    def ids(self, document: int, start: int, length: int) -> np.ndarray:
        """``length`` tokens of a document from ``start`` on, int32, a view of the file."""
        part = bisect_right(self._ends, document)
        row = document - (self._ends[part - 1] if part else 0)
        begin = int(self._offsets[part][row]) + start
        values: np.ndarray = self._values[part][begin : begin + length]
        return values

    def rows(self) -> Iterator[tuple[pa.Array, pa.Array, np.ndarray]]:
        """(sources, names, tokens) of the documents, in batches of ``DOCUMENT_ROWS``."""
        names = pa.chunked_array([batch.column("name") for batch in self._batches], pa.string())
        sources = pa.array(self.source_names, pa.string())
        for begin in range(0, len(self.lengths), DOCUMENT_ROWS):
            rows = slice(begin, begin + DOCUMENT_ROWS)
            mine = names.slice(begin, DOCUMENT_ROWS).combine_chunks()
            yield sources.take(pa.array(self.sources[rows])), mine, self.lengths[rows]


def _read(file: Path) -> pa.RecordBatch:
    with pa.memory_map(str(file)) as source:
        (batch,) = pa.ipc.open_stream(source)
        return batch
