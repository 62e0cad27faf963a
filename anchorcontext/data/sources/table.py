"""Tables: Parquet files, Arrow files, and the folders that ``datasets`` saves to disk."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ...errors import UserError
from .documents import Item, Position, Problem
from .files import digest_files, inside
from .rows import RowReader

PARQUET = ".parquet"
SUFFIXES = (PARQUET, ".arrow")
MOST_ROWS = 4096
FILE_MAGIC, END_OF_STREAM = b"ARROW1", b"\xff\xff\xff\xff\0\0\0\0"
STATE, SPLITS = "state.json", "dataset_dict.json"


class MissingColumn(Exception):
    """A table without a column that its source names."""


@dataclass(frozen=True)
class TableChunk:
    """Rows of one table, the first of them row ``first_row``; or why there are none.

    ``data`` is an Arrow IPC stream of the rows alone: a pickled slice would carry its whole table.
    """

    reader: RowReader
    path: str
    inside: str
    first_row: int
    data: bytes
    after: Position
    damage: Problem | None = None

    @property
    def size(self) -> int:
        return len(self.data)

    def items(self) -> Iterator[Item]:
        if self.data:
            yield from self._rows(pa.ipc.open_stream(self.data).read_next_batch())
        if self.damage is not None:
            yield self.damage

    def _rows(self, rows: pa.RecordBatch) -> Iterator[Item]:
        tokens = self.reader.tokens_field
        # Lists of ids stay arrays: as Python integers they would take 8 times the memory.
        ids = rows.column(tokens) if tokens in rows.schema.names else None
        others = rows if ids is None else rows.drop_columns([tokens])
        for index, row in enumerate(others.to_pylist()):
            if ids is not None:
                row[tokens] = _values(ids[index])
            number = self.first_row + index
            yield from self.reader.items(row, f"{self.path}:{number}", f"{self.inside}:{number}")


def to_stream(rows: pa.RecordBatch) -> bytes:
    """The rows as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    return sink.getvalue().to_pybytes()


def _values(cell: pa.Scalar) -> Any:
    """A list's values as an array where they are numbers; anything else as Python gives it."""
    is_list = isinstance(cell, pa.ListScalar | pa.LargeListScalar | pa.FixedSizeListScalar)
    if not is_list or cell.values is None or not pa.types.is_integer(cell.values.type):
        return cell.as_py()
    return cell.as_py() if cell.values.null_count else cell.values.to_numpy(zero_copy_only=False)


@dataclass(frozen=True)
class Tables:
    """Every row of every Parquet or Arrow file is an entry; rows are numbered from 0 in a file.

    A position is (file, row).
    """

    reader: RowReader
    root: Path
    paths: Sequence[Path]

    @property
    def name(self) -> str:
        return self.reader.source

    @property
    def num_bytes(self) -> int | None:
        """None: columns that are not read, and packed ones, make the files' sizes no measure."""
        return None

    def digest(self) -> dict[str, Any]:
        return digest_files(self.root, self.paths)

    def chunks(self, start: Position, chunk_bytes: int) -> Iterator[TableChunk]:
        first, row = start or (0, 0)
        for index in range(first, len(self.paths)):
            yield from self._file(index, row, chunk_bytes)
            row = 0

    def _file(self, index: int, row: int, chunk_bytes: int) -> Iterator[TableChunk]:
        path = self.paths[index]
        name = inside(path, self.root)
        try:
            for rows in _batches(path, self.reader, row, chunk_bytes):
                after = (index, row + rows.num_rows)
                yield TableChunk(self.reader, str(path), name, row, to_stream(rows), after)
                row += rows.num_rows
        except (OSError, pa.ArrowException, MissingColumn) as error:
            kind = "no such column" if isinstance(error, MissingColumn) else "unreadable file"
            problem = Problem(self.name, f"{path}:{row}", kind, str(error).splitlines()[0])
            yield TableChunk(self.reader, str(path), name, row, b"", (index + 1, 0), problem)


def _batches(path: Path, reader: RowReader, row: int, chunk_bytes: int) -> Iterator[pa.RecordBatch]:
    """The rows from ``row`` on, in batches whose edges depend on the file alone."""
    groups = _parquet_groups if path.suffix == PARQUET else _arrow_groups
    begin = 0
    for num_rows, batches in groups(path, reader, chunk_bytes):
        if row < begin + num_rows:
            for batch in batches:
                if begin >= row and batch.num_rows:
                    yield batch
                begin += batch.num_rows
        else:
            begin += num_rows


Group = tuple[int, Iterator[pa.RecordBatch]]
"""Rows, and the batches that hold them."""


def _parquet_groups(path: Path, reader: RowReader, chunk_bytes: int) -> Iterator[Group]:
    with pq.ParquetFile(path, memory_map=True, page_checksum_verification=True) as file:
        columns = _columns(path, reader, file.schema_arrow.names)
        for index in range(file.num_row_groups):
            group = file.metadata.row_group(index)
            parts = (group.column(i) for i in range(group.num_columns))
            num_bytes = sum(
                part.total_uncompressed_size
                for part in parts
                if any(part.path_in_schema.split(".")[0] == c.split(".")[0] for c in columns)
            )
            # Repeated values take more bytes in memory than in the file: cut once more.
            size = max(1, min(group.num_rows * chunk_bytes // max(num_bytes, 1), MOST_ROWS))
            batches = file.iter_batches(size, row_groups=[index], columns=columns)
            yield group.num_rows, _cut(batches, chunk_bytes)


def _cut(batches: Iterable[pa.RecordBatch], chunk_bytes: int) -> Iterator[pa.RecordBatch]:
    """The batches in slices of about ``chunk_bytes``; nothing is read until it is asked for."""
    for batch in batches:
        size = max(1, batch.num_rows * chunk_bytes // max(batch.nbytes, 1))
        yield from (batch.slice(begin, size) for begin in range(0, batch.num_rows, size))


def _arrow_groups(path: Path, reader: RowReader, chunk_bytes: int) -> Iterator[Group]:
    with pa.memory_map(str(path)) as source:
        for batch in _record_batches(source):
            batch = batch.select(_columns(path, reader, batch.schema.names))
            yield batch.num_rows, _cut([batch], chunk_bytes)


def _record_batches(source: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    """Of a file in Arrow's file format, or in its stream format, which ``datasets`` writes.

    Raises:
        pa.ArrowInvalid: it is neither, or a stream without its end, which may lack rows.
    """
    if source.read(len(FILE_MAGIC)) == FILE_MAGIC:
        file = pa.ipc.open_file(source)
        yield from (file.get_batch(index) for index in range(file.num_record_batches))
        return
    source.seek(0)
    yield from pa.ipc.open_stream(source)
    source.seek(source.size() - len(END_OF_STREAM))
    if source.read() != END_OF_STREAM:
        raise pa.ArrowInvalid("the Arrow stream has no end: rows may be missing")


def _columns(path: Path, reader: RowReader, names: Sequence[str]) -> list[str]:
    """The columns to read.

    Raises:
        MissingColumn: the table lacks one.
    """
    found = []
    for field, optional in reader.fields:
        column = field if field in names else field.split(".")[0]
        if column in names:
            found.append(column)
        elif not optional:
            raise MissingColumn(f"{column!r}, but {', '.join(names[:8])}")
    return list(dict.fromkeys(found))


def saved_tables(folder: Path, split: str, key: str) -> list[Path] | None:
    """The Arrow files of a folder written by ``save_to_disk``, in order; None of another folder.

    Raises:
        UserError: it holds several splits, none of them ``split``; or it is damaged.
    """
    if (folder / SPLITS).is_file():
        splits = json.loads((folder / SPLITS).read_text(encoding="utf-8"))["splits"]
        if split not in splits:
            raise UserError(
                f"{key}.split = {split!r}: {folder} has the splits {', '.join(splits)}; choose one"
            )
        folder = folder / split
    if not (folder / STATE).is_file():
        return None
    state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    return [folder / entry["filename"] for entry in state["_data_files"]]
