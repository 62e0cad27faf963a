"""JSON lines, plain or packed: blocks of whole lines, parsed where they are tokenised."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .documents import Item, Position, Problem
from .files import BOM, READ_ERRORS, digest_files, inside, read_pieces, total_bytes
from .rows import RowReader

SUFFIXES = tuple(
    f".{kind}{packed}" for kind in ("jsonl", "ndjson") for packed in ("", ".gz", ".zst")
)


@dataclass(frozen=True)
class LinesChunk:
    """Whole lines of one file, the first of them line ``first_line``; then maybe its damage.

    Lines of white space only are separators, not entries.
    """

    reader: RowReader
    path: str
    inside: str
    first_line: int
    data: bytes
    after: Position
    damage: Problem | None = None

    @property
    def size(self) -> int:
        return len(self.data)

    def items(self) -> Iterator[Item]:
        for number, line in enumerate(self.data.split(b"\n"), start=self.first_line):
            if number == 1:
                line = line.removeprefix(BOM)
            if line.strip():
                yield from self._parse(line, f"{self.path}:{number}", f"{self.inside}:{number}")
        if self.damage is not None:
            yield self.damage

    def _parse(self, line: bytes, location: str, name: str) -> Iterator[Item]:
        source = self.reader.source
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            detail = f"at byte {error.start} of the line"
            yield Problem(source, location, "invalid UTF-8", detail)
        except (ValueError, RecursionError) as error:
            yield Problem(source, location, "broken JSON", str(error))
        else:
            if isinstance(row, dict):
                yield from self.reader.items(row, location, name)
            else:
                kind = type(row).__name__
                yield Problem(source, location, "not a JSON object", f"but a {kind}")


@dataclass(frozen=True)
class JsonLines:
    """One JSON object a line; ``.gz`` and ``.zst`` files are unpacked.

    A position is (file, byte, line): the unpacked bytes and the lines before it.
    """

    reader: RowReader
    root: Path
    paths: Sequence[Path]

    @property
    def name(self) -> str:
        return self.reader.source

    @property
    def num_bytes(self) -> int | None:
        return total_bytes(self.paths)

    def digest(self) -> dict[str, Any]:
        return digest_files(self.root, self.paths)

    def chunks(self, start: Position, chunk_bytes: int) -> Iterator[LinesChunk]:
        first, offset, lines = start or (0, 0, 0)
        for index in range(first, len(self.paths)):
            yield from self._file(index, offset, lines, chunk_bytes)
            offset = lines = 0

    def _file(self, index: int, offset: int, lines: int, chunk_bytes: int) -> Iterator[LinesChunk]:
        path = self.paths[index]
        pieces = read_pieces(path, offset)
        unread = bytearray()
        last = False
        while not last:
            damage = None
            try:
                data, unread, last = _whole_lines(pieces, unread, chunk_bytes)
            except READ_ERRORS as error:
                # What follows the last whole line is cut by the damage, not broken by itself.
                data, last = bytes(unread[: unread.rfind(b"\n") + 1]), True
                line = lines + data.count(b"\n") + 1
                damage = Problem(self.name, f"{path}:{line}", "unreadable file", str(error))
            first_line = lines + 1
            lines += data.count(b"\n")
            offset += len(data)
            after = (index + 1, 0, 0) if last else (index, offset, lines)
            if data or damage is not None:
                name = inside(path, self.root)
                yield LinesChunk(self.reader, str(path), name, first_line, data, after, damage)


def _whole_lines(
    pieces: Iterator[bytes], unread: bytearray, chunk_bytes: int
) -> tuple[bytes, bytearray, bool]:
    """``chunk_bytes`` or more that end a line, what was read past them, and false; at the end of
    the file all that is left, nothing, and true. ``unread`` grows in place until then."""
    searched = 0
    for piece in pieces:
        unread += piece
        if len(unread) >= chunk_bytes:
            end = unread.rfind(b"\n", searched)
            if end >= 0:
                return bytes(unread[: end + 1]), unread[end + 1 :], False
            searched = len(unread)
    return bytes(unread), bytearray(), True
