"""The prepared folder: windows on disk, memory-mapped, complete or not there at all.

::

    PATH/meta.json            what it holds and how it was made; written last
    PATH/windows-00000.arrow  one row a window: input_ids, cu_seqlens, documents, starts
    PATH/documents.arrow      one row a document: source, name, num_tokens
    PATH/problems.jsonl       entries of the corpus that were left out
    PATH/tokenizer/           the tokenizer, as a Hugging Face folder

The data files are Arrow IPC streams, the files that ``datasets`` keeps its own data in: rows are
read from the page cache without a copy or a parser, many processes share one mapping, and
``datasets.Dataset.from_file``, pyarrow, polars and duckdb open them without us. They are read and
written with pyarrow alone, so a training rank does not import ``datasets``.

A folder is built beside its place as ``PATH.incomplete`` and renamed when all of it is on disk.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import UserError, writing
from ..modes import Mode
from ..window import Window

FORMAT_VERSION = 1
META, DOCUMENTS, PROBLEMS, TOKENIZER = "meta.json", "documents.arrow", "problems.jsonl", "tokenizer"
ANCHOR_DOCUMENT = -1
SHARD_TOKENS = 1 << 26  # 256 MiB of ids a file
BATCH_TOKENS = 1 << 20  # rows are looked up by batch: thousands of batches even at 1e9 tokens

WINDOW_SCHEMA = pa.schema(
    {
        "input_ids": pa.list_(pa.int32()),
        "cu_seqlens": pa.list_(pa.int32()),
        "documents": pa.list_(pa.int64()),
        "starts": pa.list_(pa.int64()),
    }
)
DOCUMENT_SCHEMA = pa.schema(
    {"source": pa.string(), "name": pa.string(), "num_tokens": pa.int64()},
)


@dataclass(frozen=True)
class WindowRecord:
    """One prepared window of L tokens in n segments; arrays are read-only views of the file.

    ``input_ids`` int32 (L,); ``cu_seqlens`` int32 (n + 1,); ``documents`` int64 (n,): the row of
    each segment in the documents table, ``-1`` for the anchor; ``starts`` int64 (n,): the segment's
    first token within its document.
    """

    input_ids: np.ndarray
    cu_seqlens: np.ndarray
    documents: np.ndarray
    starts: np.ndarray

    def window(self, mode: str | Mode, boundary: str = "mask") -> Window:
        """The window under a mode. Segments of one document are one document."""
        _, segment_docs = np.unique(self.documents, return_inverse=True)
        return Window(
            self.input_ids, self.cu_seqlens, mode, segment_docs=segment_docs, boundary=boundary
        )


@dataclass(frozen=True)
class DocumentInfo:
    """Where a document came from. ``num_tokens`` counts what packing was given."""

    source: str
    name: str
    num_tokens: int


class WindowDataset:
    """The windows of a prepared folder; ``dataset[i]`` is a :class:`WindowRecord`.

    Raises:
        UserError: the folder is not there, not finished, damaged, or of another format.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.meta = read_meta(self.path)
        if self.meta is None:
            raise UserError(
                f"data.path = {str(path)!r} is not a prepared folder (it has no {META}): run "
                "`anchorcontext prepare CONFIG` first"
            )
        self.fingerprint: str = self.meta["fingerprint"]
        self.anchor_id: int | None = self.meta["anchor_id"]
        self.vocab_size: int = self.meta["vocab_size"]
        self.window_tokens: int = self.meta["window_tokens"]
        batches = [b for shard in self.meta["shards"] for b in _read_batches(self.path / shard)]
        self._columns = [[batch.column(name) for name in WINDOW_SCHEMA.names] for batch in batches]
        self._ends = np.cumsum([batch.num_rows for batch in batches], dtype=np.int64)
        self._documents: pa.Table | None = None
        self._check_complete("windows", len(self), self.meta["num_windows"])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> WindowRecord:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        batch = int(np.searchsorted(self._ends, index, side="right"))
        row = index - (int(self._ends[batch - 1]) if batch else 0)
        values = [column[row].values.to_numpy() for column in self._columns[batch]]
        return WindowRecord(*values)

    def __iter__(self) -> Iterator[WindowRecord]:
        return (self[index] for index in range(len(self)))

    def __reduce__(self) -> tuple[type[WindowDataset], tuple[Path]]:
        return WindowDataset, (self.path,)  # a mapping does not travel to another process

    @property
    def tokenizer_path(self) -> Path:
        """The folder of the tokenizer the windows were made with."""
        return self.path / TOKENIZER

    @property
    def num_documents(self) -> int:
        """Rows of the documents table."""
        return int(self.meta["num_documents"]) if self.meta else 0

    def document(self, index: int) -> DocumentInfo:
        """Row ``index`` of the documents table: source, name, tokens."""
        if self._documents is None:
            batches = _read_batches(self.path / DOCUMENTS)
            self._documents = pa.Table.from_batches(batches, schema=DOCUMENT_SCHEMA)
            self._check_complete("documents", self._documents.num_rows, self.num_documents)
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        row = self._documents.slice(index, 1).to_pylist()[0]
        return DocumentInfo(row["source"], row["name"], row["num_tokens"])

    def _check_complete(self, what: str, found: int, expected: int) -> None:
        if found != expected:
            raise UserError(
                f"data.path = {str(self.path)!r} is damaged: {found} {what} on disk, {META} "
                f"promises {expected}; run `anchorcontext prepare CONFIG --force`"
            )


def read_meta(path: Path) -> dict[str, Any] | None:
    """``meta.json`` of a prepared folder; None where there is none.

    Raises:
        UserError: it cannot be read, or is of another format version.
    """
    file = path / META
    if not file.is_file():
        return None
    try:
        meta: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        version = meta["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} cannot be read ({error}); prepare again with --force") from error
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path} has format version {version}, this anchorcontext reads {FORMAT_VERSION}: "
            "prepare again with --force"
        )
    return meta


def _read_batches(file: Path) -> list[pa.RecordBatch]:
    try:
        with pa.memory_map(str(file)) as source:
            return list(pa.ipc.open_stream(source))
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(
            f"{file} is missing or damaged ({error}): run `anchorcontext prepare CONFIG --force`"
        ) from error


class Builder:
    """A prepared folder in the making; :func:`build_folder` makes one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shards: list[str] = []
        self.num_windows = 0
        self._hash = hashlib.blake2b(digest_size=16)

    def write_documents(self, batches: Iterable[tuple[list[str], list[str], np.ndarray]]) -> None:
        """Write the documents table from batches of (sources, names, num_tokens)."""
        with pa.ipc.new_stream(self.folder / DOCUMENTS, DOCUMENT_SCHEMA) as writer:
            for columns in batches:
                arrays = [
                    pa.array(column, field.type)
                    for column, field in zip(columns, DOCUMENT_SCHEMA, strict=True)
                ]
                writer.write_batch(pa.record_batch(arrays, schema=DOCUMENT_SCHEMA))

    def write_windows(
        self,
        records: Iterable[WindowRecord],
        *,
        shard_tokens: int = SHARD_TOKENS,
        batch_tokens: int = BATCH_TOKENS,
    ) -> None:
        """Write windows in order, a new file every ``shard_tokens``."""
        for shard in _chunks(records, shard_tokens):
            name = f"windows-{len(self.shards):05d}.arrow"
            self.shards.append(name)
            with pa.ipc.new_stream(self.folder / name, WINDOW_SCHEMA) as writer:
                for rows in _chunks(shard, batch_tokens):
                    batch = list(rows)
                    self.num_windows += len(batch)
                    writer.write_batch(self._to_arrow(batch))

    def _to_arrow(self, records: Sequence[WindowRecord]) -> pa.RecordBatch:
        columns = []
        for field in WINDOW_SCHEMA:
            arrays = [getattr(record, field.name) for record in records]
            values = np.concatenate(arrays).astype(field.type.value_type.to_pandas_dtype())
            offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
            columns.append(pa.ListArray.from_arrays(offsets, values, type=field.type))
        for record in records:
            self._hash.update(np.ascontiguousarray(record.input_ids, dtype=np.int32).tobytes())
            self._hash.update(np.ascontiguousarray(record.cu_seqlens, dtype=np.int32).tobytes())
        return pa.record_batch(columns, schema=WINDOW_SCHEMA)

    def write_meta(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Write ``meta.json``: ``meta``, completed with what the builder knows; the last step.

        ``fingerprint`` is of the windows' content: two folders with the same one hold the same
        windows in the same order, wherever and whenever they were made.
        """
        complete = {
            "version": FORMAT_VERSION,
            "fingerprint": self._hash.hexdigest(),
            "num_windows": self.num_windows,
            "shards": self.shards,
            **meta,
        }
        (self.folder / META).write_text(json.dumps(complete, indent=2) + "\n", encoding="utf-8")
        return complete


def _chunks(records: Iterable[WindowRecord], num_tokens: int) -> Iterator[Iterator[WindowRecord]]:
    """Lazy runs of records, each ended by the record that fills ``num_tokens``."""
    iterator = iter(records)

    def run(first: WindowRecord) -> Iterator[WindowRecord]:
        yield first
        size = len(first.input_ids)
        while size < num_tokens:
            record = next(iterator, None)
            if record is None:
                return
            size += len(record.input_ids)
            yield record

    while (first := next(iterator, None)) is not None:
        yield run(first)


@contextmanager
def build_folder(path: Path) -> Iterator[Builder]:
    """Build the prepared folder ``path`` beside its place; on success it replaces ``path``.

    An error, or Ctrl-C, leaves ``path`` as it was. A killed process leaves ``PATH.incomplete``,
    which nothing reads and the next build removes.

    Raises:
        UserError: ``path`` holds something that is no prepared folder, or another process is
            building it.
    """
    check_replaceable(path)
    beside = path.with_name(path.name + ".incomplete")
    with writing("data.path", path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path.with_name(path.name + ".lock"), path):
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        try:
            yield Builder(beside)
            assert (beside / META).is_file(), "write_meta is the last step of a build"
            _sync(beside)
            _replace(path, beside)
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def check_replaceable(path: Path) -> None:
    """Refuse to build where something else than a prepared folder lies.

    Raises:
        UserError: ``path`` is a file, or a folder with other content.
    """
    if path.exists() and not (path / META).is_file() and not _is_empty_folder(path):
        raise UserError(
            f"data.path = {str(path)!r} exists and is no prepared folder: prepare would replace "
            "what lies there; choose another path"
        )


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and next(path.iterdir(), None) is None


@contextmanager
def _lock(file: Path, path: Path) -> Iterator[None]:
    """Held by one process; the system releases it when that process ends, however it ends."""
    with writing("data.path", path):
        handle = file.open("w")
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The holder before us may have unlinked the very file that we opened.
            held = file.exists() and file.stat().st_ino == os.fstat(handle.fileno()).st_ino
        except BlockingIOError:
            held = False
        if not held:
            raise UserError(
                f"another process is preparing {path}: wait until it is done, or choose another "
                "data.path"
            )
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    for file in [*folder.rglob("*"), folder]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _replace(path: Path, beside: Path) -> None:
    old = path.with_name(path.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    beside.rename(path)
    shutil.rmtree(old, ignore_errors=True)
