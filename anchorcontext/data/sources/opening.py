"""The entries of ``data.sources`` as sources, and all their chunks as one sequence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from ...errors import UserError
from . import jsonl, table
from .documents import Chunk, Document, Position, ProblemLog, sift
from .files import list_files
from .hub import HubDataset
from .jsonl import JsonLines
from .rows import RowReader
from .stdlib import StandardLibrary
from .table import Tables, saved_tables
from .text import TextFiles

KINDS = ("auto", "text", "jsonl", "parquet", "datasets", "stdlib")
SUFFIXES = {"jsonl": jsonl.SUFFIXES, "parquet": table.SUFFIXES}
# May be one object a line, one document a file, or a table that nothing here reads.
AMBIGUOUS = tuple(
    f".{kind}{packed}" for kind in ("json", "csv", "tsv") for packed in ("", ".gz", ".zst")
)
# One task of a worker: its token ids and their Python lists stay below 100 MB.
CHUNK_BYTES = 1 << 21


class Source(Protocol):
    """One entry of ``data.sources``."""

    @property
    def name(self) -> str:
        """The name its tokens are counted under."""

    @property
    def num_bytes(self) -> int | None:
        """The sum of its chunks' sizes, where that is known without reading."""

    def digest(self) -> dict[str, Any]:
        """What the entries are, without reading them: it changes when they may have."""

    def chunks(self, start: Position, chunk_bytes: int) -> Iterator[Chunk]:
        """Everything from ``start`` on, in chunks of about ``chunk_bytes``."""


def read_chunks(
    sources: Sequence[Source], start: Position = (), chunk_bytes: int = CHUNK_BYTES
) -> Iterator[tuple[Position, Chunk]]:
    """All chunks from ``start`` on, one source after the other, each with the position after it."""
    first, inner = (start[0], start[1:]) if start else (0, ())
    for index in range(first, len(sources)):
        for chunk in sources[index].chunks(inner, chunk_bytes):
            yield (index, *chunk.after), chunk
        inner = ()


def read_documents(sources: Sequence[Source], log: ProblemLog) -> Iterator[Document]:
    """The documents of all sources, one source after the other; problems go to ``log``.

    Raises:
        UserError: there is a problem and ``log.on_error`` is ``"stop"``.
    """
    chunks = (chunk for _, chunk in read_chunks(sources))
    return sift((item for chunk in chunks for item in chunk.items()), log)


def open_sources(entries: Iterable[Any]) -> list[Source]:
    """The sources of a config's ``data.sources`` (objects with the attributes of that section).

    Raises:
        UserError: an entry names nothing that can be read, or two entries have the same name.
    """
    sources = [open_source(entry, f"data.sources[{i}]") for i, entry in enumerate(entries)]
    if not sources:
        raise UserError("data.sources is empty: prepare needs at least one source of documents")
    for name, count in Counter(source.name for source in sources).items():
        if count > 1:
            raise UserError(
                f"{count} of data.sources are called {name!r}: names must differ, because tokens "
                "are counted by them; set data.sources[i].name"
            )
    return sources


def open_source(entry: Any, key: str = "source") -> Source:
    """The source that ``entry`` describes: an object with the attributes of ``SourceSection``.

    Raises:
        UserError: nothing is there, nothing matches, or the kind cannot be told.
    """
    if entry.kind not in KINDS:
        raise UserError(f"{key}.kind = {entry.kind!r}: must be one of {', '.join(KINDS)}")
    if entry.kind == "stdlib":
        return StandardLibrary(entry.name or "", entry.pattern)
    if not entry.path:
        raise UserError(f"{key}.path is not set: only kind 'stdlib' needs no path")
    root = Path(entry.path).expanduser()
    name = entry.name or root.name.split(".")[0] or root.resolve().name
    reader = RowReader(name, entry.text_field, entry.source_field, entry.tokens_field)
    if entry.kind in ("auto", "datasets") and root.is_dir():
        saved = saved_tables(root, entry.split, key)
        if saved is not None:
            return Tables(reader, root, saved)
    if entry.kind == "datasets":
        return HubDataset(
            reader, entry.path, entry.subset, entry.split, entry.revision, entry.streaming
        )
    return _open_files(entry, root, reader, key)


def _open_files(entry: Any, root: Path, reader: RowReader, key: str) -> Source:
    if not root.exists():
        raise UserError(
            f"{key}.path = {entry.path!r}: there is no such file or folder (the name of a data set "
            f"on the hub needs {key}.kind=datasets)"
        )
    files = list_files(root, entry.pattern)
    kind = _guess_kind(root, files, key) if entry.kind == "auto" else entry.kind
    if root.is_dir() and entry.pattern is None and kind in SUFFIXES:
        files = [path for path in files if path.name.endswith(SUFFIXES[kind])]
    if not files:
        rule = (
            f"matches pattern {entry.pattern!r}" if entry.pattern else f"of kind {kind!r} is in it"
        )
        raise UserError(f"{key}.path = {entry.path!r}: no file {rule}")
    if kind == "text":
        return TextFiles(reader.source, root, files)
    return (JsonLines if kind == "jsonl" else Tables)(reader, root, files)


def _guess_kind(root: Path, files: Sequence[Path], key: str) -> str:
    """By the files' endings.

    Raises:
        UserError: they are of several kinds, or their endings say too little.
    """
    if files and all(path.name.endswith(AMBIGUOUS) for path in files):
        ending = max((end for end in AMBIGUOUS if files[0].name.endswith(end)), key=len)
        pattern = "" if root.is_file() else f" and {key}.pattern='*{ending}'"
        raise UserError(
            f"{key}.path = {str(root)!r}: {files[0].name} may hold one JSON object a line or be "
            f"one document: say so with {key}.kind=jsonl{pattern}, or {key}.kind=text (tables of "
            "comma-separated values are not read: convert them to Parquet)"
        )
    found = Counter(
        next((kind for kind, ends in SUFFIXES.items() if path.name.endswith(ends)), "text")
        for path in files
    )
    if len(found) > 1:
        listed = " and ".join(f"{count} of kind {kind}" for kind, count in found.most_common())
        raise UserError(
            f"{key}.path = {str(root)!r} holds files of several kinds, {listed}: say which are "
            f"meant with {key}.kind or {key}.pattern"
        )
    return next(iter(found), "text")
