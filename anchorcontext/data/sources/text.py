"""Folders of text and code: every file is one document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .documents import Item, Position, Problem, make_document
from .files import BOM, digest_files, inside, total_bytes

# Files of a chunk: reading many small ones takes longer than their bytes say.
MOST_FILES = 1024
EMPTY = "empty document"


@dataclass(frozen=True)
class FilesChunk:
    """Files that are one document each, as it is: line ends and indentation stay."""

    source: str
    paths: tuple[tuple[str, str], ...]
    """(path, name of the document)."""
    size: int
    after: Position
    skip_empty: bool = False

    def items(self) -> Iterator[Item]:
        for path, name in self.paths:
            item = read_text_file(Path(path), self.source, name)
            if not (self.skip_empty and isinstance(item, Problem) and item.kind == EMPTY):
                yield item


@dataclass(frozen=True)
class TextFiles:
    """A position is (file,). ``skip_empty``: files without any text are no entries at all."""

    name: str
    root: Path
    paths: Sequence[Path]
    skip_empty: bool = False

    @property
    def num_bytes(self) -> int | None:
        return total_bytes(self.paths)

    def digest(self) -> dict[str, Any]:
        return digest_files(self.root, self.paths)

    def chunks(self, start: Position, chunk_bytes: int) -> Iterator[FilesChunk]:
        size = 0
        group: list[tuple[str, str]] = []
        (first,) = start or (0,)
        for index in range(first, len(self.paths)):
            path = self.paths[index]
            group.append((str(path), inside(path, self.root)))
            size += path.stat().st_size if path.exists() else 0
            full = size >= chunk_bytes or len(group) == MOST_FILES
            if full or index == len(self.paths) - 1:
                yield FilesChunk(self.name, tuple(group), size, (index + 1,), self.skip_empty)
                size, group = 0, []


def read_text_file(path: Path, source: str, name: str) -> Item:
    """The file as a document called ``name``, or the reason why it is none."""
    try:
        data = path.read_bytes().removeprefix(BOM)
    except OSError as error:
        return Problem(source, str(path), "unreadable file", error.strerror or str(error))
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return Problem(source, f"{path}:{line}", "invalid UTF-8", f"at byte {error.start}")
    return make_document(source, name, text, str(path))
