"""Where documents come from: text and code folders, JSONL files, the Python standard library.

A source yields its items in one fixed order: a :class:`Document`, or a :class:`Problem` where
something could not become a document. It decides nothing about problems; :func:`read_documents`
does. A new kind of source is a class with the two methods of :class:`Source` and one line in
:func:`open_source`.
"""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from ..errors import UserError

KINDS = ("auto", "text", "jsonl", "stdlib")
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
BOM = b"\xef\xbb\xbf"
# A stop names more than the first problem, but must not read a whole corpus to find the others.
MAX_EXAMPLES = 10
LOOK_AHEAD_DOCUMENTS = 10_000


@dataclass(frozen=True)
class Document:
    """One text. ``source`` is the name its shares are counted under, ``name`` finds it again."""

    source: str
    name: str
    text: str


@dataclass(frozen=True)
class Problem:
    """Something in a source that is no document: ``location`` is ``file`` or ``file:line``."""

    source: str
    location: str
    kind: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.location}: {self.kind}" + (f" ({self.detail})" if self.detail else "")


class Source(Protocol):
    """One entry of ``data.sources``."""

    @property
    def name(self) -> str:
        """The name its tokens are counted under."""

    def files(self) -> Sequence[Path]:
        """Every file the documents are read from, in order."""

    def digest(self) -> dict[str, Any]:
        """What the files are, without reading them: it changes when the documents may have."""

    def read(self) -> Iterator[Document | Problem]:
        """All documents and problems, always in the same order."""


@dataclass
class ProblemLog:
    """What could not become a document: counts by kind, all of them in order.

    ``on_error`` ``"stop"``: the first problems end the run; ``"skip"``: they are left out.
    """

    on_error: str = "stop"
    problems: list[Problem] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """Problems by kind, most frequent first."""
        return dict(Counter(problem.kind for problem in self.problems).most_common())


def read_documents(sources: Iterable[Source], log: ProblemLog) -> Iterator[Document]:
    """The documents of all sources, one source after the other; problems go to ``log``.

    Raises:
        UserError: there is a problem and ``log.on_error`` is ``"stop"``; the message names it and
            those after it, up to ten.
    """
    for source in sources:
        items = source.read()
        for item in items:
            if isinstance(item, Document):
                yield item
                continue
            log.problems.append(item)
            if log.on_error == "stop":
                raise UserError(_stop_message(log, items))


def _stop_message(log: ProblemLog, rest: Iterator[Document | Problem]) -> str:
    for _, item in zip(range(LOOK_AHEAD_DOCUMENTS), rest, strict=False):
        if isinstance(item, Problem):
            log.problems.append(item)
            if len(log.problems) > MAX_EXAMPLES:
                break
    shown = "".join(f"\n  {problem}" for problem in log.problems[:MAX_EXAMPLES])
    more = "\n  ... and more" if len(log.problems) > MAX_EXAMPLES else ""
    return (
        f"the corpus has entries that are no documents:{shown}{more}\n"
        "mend them, or set data.on_error=skip to leave them out (they are then counted and listed)"
    )


def open_sources(entries: Sequence[Any]) -> list[Source]:
    """The sources of a config's ``data.sources`` (objects with the attributes of that section).

    Raises:
        UserError: an entry names nothing that can be read, or two entries have the same name.
    """
    if not entries:
        raise UserError("data.sources is empty: prepare needs at least one source of documents")
    sources = [open_source(entry, f"data.sources[{i}]") for i, entry in enumerate(entries)]
    for name, count in Counter(source.name for source in sources).items():
        if count > 1:
            raise UserError(
                f"{count} of data.sources are called {name!r}: names must differ, because tokens "
                "are counted by them; set data.sources[i].name"
            )
    return sources


def open_source(entry: Any, key: str = "source") -> Source:
    """The source that ``entry`` (path, kind, name, text_field, pattern) describes.

    Raises:
        UserError: nothing is there, nothing matches, or the kind cannot be told.
    """
    if entry.kind not in KINDS:
        raise UserError(f"{key}.kind = {entry.kind!r}: must be one of {', '.join(KINDS)}")
    if entry.kind == "stdlib":
        from .stdlib import StandardLibrary

        return StandardLibrary(entry.name or "", entry.pattern)
    if not entry.path:
        raise UserError(f"{key}.path is not set: only kind 'stdlib' needs no path")
    root = Path(entry.path).expanduser()
    if not root.exists():
        raise UserError(f"{key}.path = {entry.path!r}: there is no such file or folder")
    kind = _guess_kind(root, entry.pattern, key) if entry.kind == "auto" else entry.kind
    pattern = entry.pattern
    files = list_files(root, pattern)
    if kind == "jsonl" and root.is_dir() and pattern is None:
        files = [path for path in files if path.name.endswith(JSONL_SUFFIXES)]
    if not files:
        rule = f"matches pattern {pattern!r}" if pattern else f"of kind {kind!r} is in it"
        raise UserError(f"{key}.path = {entry.path!r}: no file {rule}")
    name = entry.name or root.name.split(".")[0] or root.resolve().name
    if kind == "text":
        return TextFiles(name, root, files)
    return JsonLines(name, root, files, entry.text_field or "text")


def list_files(
    root: Path, pattern: str | None = None, *, without: frozenset[str] = frozenset()
) -> list[Path]:
    """The regular files under ``root`` (or ``root`` itself), sorted by relative path.

    Hidden files and folders are left out. Links are followed, each folder is entered once.
    ``pattern`` is a glob:
    without a slash it is compared with file names at any depth, with one with the path relative
    to ``root``, where ``*`` also crosses folders. Folders called as in ``without`` are not entered.

    Raises:
        UserError: a folder cannot be read.
    """
    if not root.is_dir():
        return [root]

    def refuse(error: OSError) -> None:
        raise UserError(f"cannot read the folder {error.filename}: {error.strerror}")

    found = []
    entered: set[str] = set()
    for folder, subfolders, names in os.walk(root, onerror=refuse, followlinks=True):
        real = os.path.realpath(folder)
        if real in entered:
            subfolders.clear()
            continue
        entered.add(real)
        subfolders[:] = sorted(
            name for name in subfolders if not name.startswith(".") and name not in without
        )
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    # A broken link stays in the list, so that reading it is reported; pipes and sockets go.
    files = [path for path in found if path.is_file() or not path.exists()]
    if pattern is not None:
        files = [path for path in files if matches(path.relative_to(root).as_posix(), pattern)]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def digest_files(root: Path, files: Sequence[Path]) -> dict[str, Any]:
    """Number and bytes of ``files`` and a digest of their names, sizes and times of change.

    Times, as ``make`` and ``rsync`` do it: reading a corpus of hundreds of GB only to find that it
    is the same would take longer than a run should wait.
    """
    digest = hashlib.blake2b(digest_size=16)
    num_bytes = 0
    for path in files:
        stat = path.lstat() if not path.exists() else path.stat()
        num_bytes += stat.st_size
        name = path.relative_to(root).as_posix()
        digest.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return {"files": len(files), "bytes": num_bytes, "digest": digest.hexdigest()}


def matches(relative: str, pattern: str) -> bool:
    """Whether the path ``relative`` fits ``pattern`` as :func:`list_files` reads it."""
    if "/" not in pattern:
        return fnmatch.fnmatchcase(relative.rsplit("/", 1)[-1], pattern)
    return any(
        fnmatch.fnmatchcase(relative, form) for form in (pattern, pattern.replace("**/", ""))
    )


def _guess_kind(root: Path, pattern: str | None, key: str) -> str:
    files = list_files(root, pattern)
    rows = sum(path.name.endswith(JSONL_SUFFIXES) for path in files)
    if 0 < rows < len(files):
        raise UserError(
            f"{key}.path = {str(root)!r} holds {rows} JSONL files and {len(files) - rows} others: "
            f"say which are meant with {key}.kind (jsonl or text) or {key}.pattern"
        )
    return "jsonl" if rows else "text"


@dataclass(frozen=True)
class TextFiles:
    """Every file is one document, as it is: line ends and indentation stay."""

    name: str
    root: Path
    paths: Sequence[Path]

    def files(self) -> Sequence[Path]:
        return self.paths

    def digest(self) -> dict[str, Any]:
        return digest_files(self.root, self.paths)

    def read(self) -> Iterator[Document | Problem]:
        for path in self.paths:
            inside = path.relative_to(self.root).as_posix() if path != self.root else path.name
            yield read_text_file(path, self.name, inside)


def read_text_file(path: Path, source: str, name: str) -> Document | Problem:
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


@dataclass(frozen=True)
class JsonLines:
    """One JSON object a line, the text under ``text_field``; ``.gz`` files are unpacked.

    Lines of white space only are separators, not entries.
    """

    name: str
    root: Path
    paths: Sequence[Path]
    text_field: str = "text"

    def files(self) -> Sequence[Path]:
        return self.paths

    def digest(self) -> dict[str, Any]:
        return digest_files(self.root, self.paths)

    def read(self) -> Iterator[Document | Problem]:
        for path in self.paths:
            inside = path.relative_to(self.root).as_posix() if path != self.root else path.name
            number = 0
            try:
                with _open_lines(path) as lines:
                    for number, line in enumerate(lines, start=1):
                        if number == 1:
                            line = line.removeprefix(BOM)
                        if line.strip():
                            yield self._parse(line, f"{path}:{number}", f"{inside}:{number}")
            except (OSError, EOFError, zlib.error) as error:
                yield Problem(self.name, f"{path}:{number + 1}", "unreadable file", str(error))

    def _parse(self, line: bytes, location: str, name: str) -> Document | Problem:
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            detail = f"at byte {error.start} of the line"
            return Problem(self.name, location, "invalid UTF-8", detail)
        except (ValueError, RecursionError) as error:
            return Problem(self.name, location, "broken JSON", str(error))
        if not isinstance(row, dict):
            kind = type(row).__name__
            return Problem(self.name, location, "not a JSON object", f"but a {kind}")
        if self.text_field not in row:
            fields = ", ".join(map(repr, list(row)[:5])) or "none"
            detail = f"text_field is {self.text_field!r}, the row has {fields}"
            return Problem(self.name, location, "no text field", detail)
        text = row[self.text_field]
        if not isinstance(text, str):
            detail = f"{self.text_field!r} is a {type(text).__name__}"
            return Problem(self.name, location, "text is not a string", detail)
        return make_document(self.name, name, text, location)


def _open_lines(path: Path) -> BinaryIO:
    if path.name.endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value]  # yields lines of bytes
    return path.open("rb")


def make_document(source: str, name: str, text: str, location: str) -> Document | Problem:
    """``text`` as a document, or the reason why nothing can be learnt from it."""
    if not text.strip():
        return Problem(source, location, "empty document")
    nul = text.find("\0")
    if nul >= 0:
        return Problem(source, location, "NUL character", f"at character {nul}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        detail = f"at character {error.start}"
        return Problem(source, location, "lone surrogate", detail)
    return Document(source, name, text)
