"""Data sets of the Hugging Face hub, and everything else that ``datasets.load_dataset`` opens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from ...errors import UserError
from ...hub import offline_without_hub
from .documents import Position
from .rows import RowReader
from .table import TableChunk, to_stream

# Rows asked for at a time; chunks are cut from these by their bytes.
ROWS = 1000


@dataclass(frozen=True)
class HubDataset:
    """One split of a data set; with ``streaming`` nothing of it is kept on disk.

    A position is (row,). Rows that ``streaming`` has passed are read again on resume.
    """

    reader: RowReader
    path: str
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    streaming: bool = False

    @property
    def name(self) -> str:
        return self.reader.source

    @property
    def num_bytes(self) -> int | None:
        return None

    @cached_property
    def _dataset(self) -> Any:
        try:
            import datasets
        except ImportError:
            raise UserError(
                f"source {self.name!r}: data sets of the hub need the package datasets; install "
                "anchorcontext[hub]"
            ) from None
        offline_without_hub(self.path)
        try:
            dataset = datasets.load_dataset(
                self.path,
                self.subset,
                split=self.split,
                revision=self.revision,
                streaming=self.streaming,
            )
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise UserError(
                f"source {self.name!r}: datasets.load_dataset({self.path!r}) failed: "
                f"{str(error).splitlines()[0]}; check path, subset, split and revision"
            ) from error
        names = dataset.column_names
        if names is not None:
            for field, optional in self.reader.fields:
                if not optional and not {field, field.split(".")[0]} & set(names):
                    raise UserError(
                        f"source {self.name!r} has no column {field!r}, but {', '.join(names)}; "
                        "set text_field, tokens_field or source_field"
                    )
        return dataset.with_format("arrow")

    def digest(self) -> dict[str, Any]:
        known = getattr(self._dataset, "_fingerprint", None)
        return {
            "subset": self.subset,
            "split": self.split,
            "revision": self.revision,
            "fingerprint": None if self.streaming else known,
        }

    def chunks(self, start: Position, chunk_bytes: int) -> Iterator[TableChunk]:
        (row,) = start or (0,)
        for table in self._tables(row):
            size = max(1, table.num_rows * chunk_bytes // max(table.nbytes, 1))
            for begin in range(0, table.num_rows, size):
                (rows,) = table.slice(begin, size).combine_chunks().to_batches()
                after = (row + rows.num_rows,)
                yield TableChunk(self.reader, self.path, self.split, row, to_stream(rows), after)
                row += rows.num_rows

    def _tables(self, row: int) -> Iterator[pa.Table]:
        """The rows from ``row`` on.

        Raises:
            UserError: they break off, whatever ``on_error`` says: nobody knows how many are lost.
        """
        dataset = self._dataset.skip(row) if row else self._dataset
        try:
            for table in dataset.iter(batch_size=ROWS):
                yield table
                row += table.num_rows
        except Exception as error:  # of the network, of files, of a loading script
            raise UserError(
                f"source {self.name!r}: reading {self.path!r} broke off at row {row} or soon "
                f"after ({type(error).__name__}: {error}); run prepare again: it continues"
            ) from error
