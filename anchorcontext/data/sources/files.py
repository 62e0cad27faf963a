"""Files of a corpus: which there are, in which order, whether they changed, and their bytes."""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow as pa

from ...errors import UserError

BOM = b"\xef\xbb\xbf"
COMPRESSED = (".gz", ".zst")
PIECE_BYTES = 1 << 16
READ_ERRORS = (OSError, EOFError, zlib.error)


def list_files(
    root: Path, pattern: str | None = None, *, without: frozenset[str] = frozenset()
) -> list[Path]:
    """The regular files under ``root`` (or ``root`` itself), sorted by relative path.

    Hidden files and folders are left out. Links are followed, each folder is entered once.
    ``pattern`` is a glob: without a slash it is compared with file names at any depth, with one
    with the path relative to ``root``, where ``*`` also crosses folders. Folders called as in
    ``without`` are not entered.

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


def inside(path: Path, root: Path) -> str:
    """``path`` relative to ``root``; its name where it is the root itself."""
    return path.relative_to(root).as_posix() if path != root else path.name


def total_bytes(files: Sequence[Path]) -> int | None:
    """Bytes that reading ``files`` gives; None where compression hides it."""
    if any(path.name.endswith(COMPRESSED) for path in files):
        return None
    return sum(path.stat().st_size for path in files if path.exists())


def read_pieces(path: Path, offset: int = 0) -> Iterator[bytes]:
    """The bytes of a plain, ``.gz`` or ``.zst`` file from ``offset`` (unpacked) on, in pieces.

    What lies before a damage has been given when one of ``READ_ERRORS`` is raised.
    """
    packed = path.name.endswith(COMPRESSED)
    done = 0 if packed else offset
    try:
        with _open(path) as stream:
            if not packed:
                stream.seek(offset)
            while piece := stream.read(PIECE_BYTES):
                done += len(piece)
                if done > offset:
                    yield piece[max(len(piece) - (done - offset), 0) :]
    except READ_ERRORS:
        rest = _up_to_damage(path, done)
        if done + len(rest) > offset:
            yield rest[max(offset - done, 0) :]
        raise


def _up_to_damage(path: Path, done: int) -> bytes:
    """What lies between byte ``done`` (unpacked), where the last whole piece ended, and the damage.

    A read that meets the damage gives nothing of what it had before, so here each is of one byte.
    """
    found = bytearray()
    try:
        with _open(path) as stream:
            while done and (piece := stream.read(min(done, PIECE_BYTES))):
                done -= len(piece)
            while byte := stream.read(1):
                found += byte
    except READ_ERRORS:
        pass
    return bytes(found)


def _open(path: Path) -> AbstractContextManager[Any]:
    if path.name.endswith(".gz"):
        return gzip.open(path, "rb")
    if path.name.endswith(".zst"):
        return pa.input_stream(str(path), compression="zstd")
    return path.open("rb", buffering=0)
