"""Writing a prepared folder: beside its place, continued after a kill, renamed when complete.

::

    PATH.incomplete/work/request.json   what is being prepared
    PATH.incomplete/work/...            what a later run can continue from
    PATH.incomplete/...                 the files of the finished folder
    PATH.lock                           held while a process prepares

Nothing reads ``PATH.incomplete``; it becomes PATH when all of it is on the disk, in one rename.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import UserError, writing
from .store import (
    DOCUMENT_SCHEMA,
    DOCUMENTS,
    FORMAT_VERSION,
    META,
    TRAIN,
    WINDOW_SCHEMA,
    WindowRecord,
)
from .tokens import sync

SHARD_TOKENS = 1 << 26  # 256 MiB of ids a file
BATCH_TOKENS = 1 << 20  # rows are looked up by batch: thousands of batches even at 1e9 tokens
WORK, REQUEST = "work", "request.json"
PREFIX = {TRAIN: "windows"}


class Builder:
    """A prepared folder in the making; :func:`build_folder` makes one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.splits: dict[str, dict[str, Any]] = {}

    @property
    def work(self) -> Path:
        """The folder for what a later run can continue from."""
        return self.folder / WORK

    def write_documents(self, batches: Iterable[tuple[Any, Any, np.ndarray]]) -> None:
        """Write the documents table from batches of (sources, names, num_tokens)."""
        with pa.ipc.new_stream(self.folder / DOCUMENTS, DOCUMENT_SCHEMA) as writer:
            for columns in batches:
                arrays = [
                    column if isinstance(column, pa.Array) else pa.array(column, field.type)
                    for column, field in zip(columns, DOCUMENT_SCHEMA, strict=True)
                ]
                writer.write_batch(pa.record_batch(arrays, schema=DOCUMENT_SCHEMA))

    def write_windows(
        self,
        records: Iterable[WindowRecord],
        split: str = TRAIN,
        *,
        shard_tokens: int = SHARD_TOKENS,
        batch_tokens: int = BATCH_TOKENS,
    ) -> None:
        """Write the windows of a split in order, a new file every ``shard_tokens``."""
        digest = hashlib.blake2b(digest_size=16)
        shards: list[str] = []
        num_windows = 0
        for shard in _chunks(records, shard_tokens):
            shards.append(f"{PREFIX.get(split, split)}-{len(shards):05d}.arrow")
            with pa.ipc.new_stream(self.folder / shards[-1], WINDOW_SCHEMA) as writer:
                for rows in _chunks(shard, batch_tokens):
                    batch = list(rows)
                    num_windows += len(batch)
                    writer.write_batch(_record_batch(batch))
                    for record in batch:
                        for field in WINDOW_SCHEMA:
                            dtype = field.type.value_type.to_pandas_dtype()
                            array = np.ascontiguousarray(getattr(record, field.name), dtype)
                            digest.update(array.tobytes())
        self.splits[split] = {
            "fingerprint": digest.hexdigest(),
            "num_windows": num_windows,
            "shards": shards,
        }

    def write_meta(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Write ``meta.json``: ``meta``, completed with what the builder knows; the last step.

        A split's ``fingerprint`` is of its windows' content: equal ones mean the same windows in
        the same order, wherever and whenever they were made.
        """
        complete = {"version": FORMAT_VERSION, "splits": self.splits, **meta}
        (self.folder / META).write_text(json.dumps(complete, indent=2) + "\n", encoding="utf-8")
        return complete


def _record_batch(records: Sequence[WindowRecord]) -> pa.RecordBatch:
    columns = []
    for field in WINDOW_SCHEMA:
        arrays = [getattr(record, field.name) for record in records]
        values = np.concatenate(arrays).astype(field.type.value_type.to_pandas_dtype())
        offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
        columns.append(pa.ListArray.from_arrays(offsets, values, type=field.type))
    return pa.record_batch(columns, schema=WINDOW_SCHEMA)


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
def build_folder(path: Path, request: dict[str, Any] | None = None) -> Iterator[Builder]:
    """Build the prepared folder ``path`` beside its place; on success it replaces ``path``.

    Whatever ends the build, ``path`` is left as it was. With ``request``, what lies finished in the
    builder's ``work`` is kept for the next build of an equal request.

    Raises:
        UserError: ``path`` holds something that is no prepared folder, or another process is
            building it.
    """
    check_replaceable(path)
    beside = path.with_name(path.name + ".incomplete")
    with writing("data.path", path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path.with_name(path.name + ".lock"), path):
        _clear(beside, request)
        try:
            yield Builder(beside)
            assert (beside / META).is_file(), "write_meta is the last step of a build"
            shutil.rmtree(beside / WORK)
            for file in [*beside.rglob("*"), beside]:
                sync(file)
            _replace(path, beside)
        finally:
            if request is None or not _has_work(beside):
                shutil.rmtree(beside, ignore_errors=True)


def _clear(beside: Path, request: dict[str, Any] | None) -> None:
    """Leave the work of an equal request, and nothing else."""
    file = beside / WORK / REQUEST
    wanted = json.dumps(request, sort_keys=True)
    if request is None or not file.is_file() or file.read_text(encoding="utf-8") != wanted:
        shutil.rmtree(beside, ignore_errors=True)
        file.parent.mkdir(parents=True)
        file.write_text(wanted, encoding="utf-8")
        return
    for other in beside.iterdir():
        if other.name != WORK:
            shutil.rmtree(other) if other.is_dir() else other.unlink()


def _has_work(beside: Path) -> bool:
    work = beside / WORK
    return work.is_dir() and any(file.name != REQUEST for file in work.glob("*.json"))


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


def _replace(path: Path, beside: Path) -> None:
    old = path.with_name(path.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    beside.rename(path)
    shutil.rmtree(old, ignore_errors=True)
