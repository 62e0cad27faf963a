"""The prepared folder: windows on disk, memory-mapped, complete or not there at all.

::

    PATH/meta.json               what it holds and how it was made; written last
    PATH/windows-00000.arrow     one row a window: the fields of WindowRecord
    PATH/validation-00000.arrow  the same of held-out documents
    PATH/documents.arrow         one row a document: source, name, num_tokens
    PATH/problems.jsonl          entries of the corpus that were left out
    PATH/tokenizer/              the tokenizer, as a Hugging Face folder

The data files are Arrow IPC streams, the files that ``datasets`` keeps its own data in: rows are
read from the page cache without a copy or a parser, many processes share one mapping, and
``datasets.Dataset.from_file``, pyarrow, polars and duckdb open them without us. They are read and
written with pyarrow alone, so a training rank does not import ``datasets``.

``builder.py`` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import UserError
from ..modes import Mode
from ..window import Window

FORMAT_VERSION = 3
META, DOCUMENTS, PROBLEMS, TOKENIZER = "meta.json", "documents.arrow", "problems.jsonl", "tokenizer"
TRAIN, VALIDATION = "train", "validation"
ANCHOR_DOCUMENT = -1
COPY_START = -1

WINDOW_SCHEMA = pa.schema(
    {
        "input_ids": pa.list_(pa.int32()),
        "cu_seqlens": pa.list_(pa.int32()),
        "documents": pa.list_(pa.int64()),
        "starts": pa.list_(pa.int64()),
        "tags": pa.list_(pa.int32()),
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
    first token within its document, ``-1`` for a copy of the anchor in front of it; ``tags`` int32
    (n,): how many tokens of a domain tag the segment begins with, before that first token.
    """

    input_ids: np.ndarray
    cu_seqlens: np.ndarray
    documents: np.ndarray
    starts: np.ndarray
    tags: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))

    def __post_init__(self) -> None:
        if not len(self.tags):
            object.__setattr__(self, "tags", np.zeros(len(self.documents), dtype=np.int32))

    def window(
        self, mode: str | Mode, boundary: str = "mask", anchor_token: int | None = None
    ) -> Window:
        """The window under a mode. Segments of one document are one document.

        Tags and copies of the anchor are never targets. ``anchor_token`` takes the place of the
        anchor and of its copies; None leaves them as they are.
        """
        _, segment_docs = np.unique(self.documents, return_inverse=True)
        copies = self.starts == COPY_START
        masked = np.where(copies, 1, self.tags)
        loss_mask = None
        if masked.any():
            lengths = np.diff(self.cu_seqlens)
            place = np.arange(len(self.input_ids)) - np.repeat(self.cu_seqlens[:-1], lengths)
            loss_mask = place >= np.repeat(masked, lengths)
        ids = self.input_ids
        if anchor_token is not None:
            anchors = self.cu_seqlens[:-1][copies | (self.documents == ANCHOR_DOCUMENT)]
            ids = ids.copy()
            ids[anchors] = anchor_token
        return Window(
            ids,
            self.cu_seqlens,
            mode,
            segment_docs=segment_docs,
            boundary=boundary,
            loss_mask=loss_mask,
            copies=copies if copies.any() else None,
        )


@dataclass(frozen=True)
class DocumentInfo:
    """Where a document came from. ``num_tokens`` counts what packing was given."""

    source: str
    name: str
    num_tokens: int


class WindowDataset:
    """The windows of one split of a prepared folder; ``dataset[i]`` is a :class:`WindowRecord`.

    ``split``: ``"train"``, or ``"validation"``, the windows of the held-out documents.

    Raises:
        UserError: the folder is not there, not finished, damaged, of another format, or without
            that split.
    """

    def __init__(self, path: str | Path, split: str = TRAIN) -> None:
        self.path = Path(path).expanduser()
        self.split = split
        self.meta = read_meta(self.path)
        if self.meta is None:
            raise UserError(
                f"data.path = {str(path)!r} is not a prepared folder (it has no {META}): run "
                "`anchorcontext prepare CONFIG` first"
            )
        if split not in self.meta["splits"]:
            raise UserError(
                f"data.path = {str(path)!r} has no split {split!r}, but "
                f"{', '.join(self.meta['splits'])}; prepare it with data.validation_fraction > 0"
            )
        mine = self.meta["splits"][split]
        self.fingerprint: str = mine["fingerprint"]
        self.anchor_id: int | None = self.meta["anchor_id"]
        self.vocab_size: int = self.meta["vocab_size"]
        self.window_tokens: int = self.meta["window_tokens"]
        batches = [b for shard in mine["shards"] for b in _read_batches(self.path / shard)]
        self._columns = [[batch.column(name) for name in WINDOW_SCHEMA.names] for batch in batches]
        self._ends = np.cumsum([batch.num_rows for batch in batches], dtype=np.int64)
        self._documents: pa.Table | None = None
        self._check_complete("windows", len(self), mine["num_windows"])

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

    def __reduce__(self) -> tuple[type[WindowDataset], tuple[Path, str]]:
        return WindowDataset, (
            self.path,
            self.split,
        )  # a mapping does not travel to another process

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


def check_files(path: Path) -> None:
    """Open all that a prepared folder promises, without reading the tokens.

    Raises:
        UserError: a file is missing or cut short.
    """
    meta = read_meta(path)
    assert meta is not None, f"{path} is a prepared folder"
    for split in meta["splits"]:
        WindowDataset(path, split).document(0)
    if not (path / TOKENIZER).is_dir():
        raise UserError(
            f"{path / TOKENIZER} is missing: run `anchorcontext prepare CONFIG --force`"
        )


def known_meta(path: Path) -> dict[str, Any] | None:
    """``meta.json`` of a prepared folder that can be read; None of anything else."""
    try:
        return read_meta(path)
    except UserError:
        return None


def _read_batches(file: Path) -> list[pa.RecordBatch]:
    try:
        with pa.memory_map(str(file)) as source:
            return list(pa.ipc.open_stream(source))
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(
            f"{file} is missing or damaged ({error}): run `anchorcontext prepare CONFIG --force`"
        ) from error
