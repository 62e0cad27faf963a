"""The Python standard library as a corpus: real documents that are on every machine.

Source files are the domain ``code``, the help texts of ``pydoc_data.topics`` are the domain
``prose``. Left out: tests (``test``, ``tests``, ``idle_test``: some are deliberately broken files,
and whether they are installed differs between distributions), installed packages
(``site-packages``, ``dist-packages``), and ``pydoc_data`` itself (the prose once more, as code).
Files without any text, such as a bare ``__init__.py``, are no documents.
"""

from __future__ import annotations

import importlib
import logging
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...errors import UserError
from .documents import Chunk, Item, Position, make_document
from .files import digest_files, list_files, matches, total_bytes
from .text import TextFiles

LEFT_OUT = frozenset(
    ("test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data", "__pycache__")
)
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StandardLibrary:
    """Every source file and every help topic of the running Python is a document.

    ``pattern`` selects documents by name, for example ``json/*`` or ``topics/*``.
    """

    name: str
    pattern: str | None = None

    @cached_property
    def root(self) -> Path:
        """The folder of the standard library."""
        root = Path(sysconfig.get_paths()["stdlib"])
        if not root.is_dir():
            raise UserError(
                f"this Python keeps its standard library in {root}, which is no folder: use a "
                "Python with its source files, or another kind of source"
            )
        return root

    @cached_property
    def _code(self) -> TextFiles:
        paths = [
            path
            for path in list_files(self.root, "*.py", without=LEFT_OUT)
            if self._selected(path.relative_to(self.root).as_posix())
        ]
        return TextFiles(f"{self._prefix}code", self.root, paths, skip_empty=True)

    @property
    def _prefix(self) -> str:
        return f"{self.name}/" if self.name else ""

    @property
    def num_bytes(self) -> int | None:
        return total_bytes(self.files())

    def files(self) -> list[Path]:
        """Every file the documents are read from."""
        return [*self._code.paths, *self.root.glob("pydoc_data/topics.py")]

    def digest(self) -> dict[str, Any]:
        return digest_files(self.root, self.files())

    def chunks(self, start: Position, chunk_bytes: int) -> Iterator[Chunk]:
        num_files = len(self._code.paths)
        if not start or start[0] < num_files:
            yield from self._code.chunks(start, chunk_bytes)
        if not start or start[0] <= num_files:
            yield TopicsChunk(f"{self._prefix}prose", tuple(self._topics()), (num_files + 1,))

    def _topics(self) -> list[tuple[str, str]]:
        try:
            topics = importlib.import_module("pydoc_data.topics").topics
        except ImportError:
            logger.warning("this Python has no pydoc_data.topics: the corpus has no prose")
            return []
        return sorted((k, v) for k, v in topics.items() if self._selected(f"topics/{k}"))

    def _selected(self, name: str) -> bool:
        return self.pattern is None or matches(name, self.pattern)


@dataclass(frozen=True)
class TopicsChunk:
    """All help topics, as (topic, text)."""

    source: str
    topics: tuple[tuple[str, str], ...]
    after: Position

    @property
    def size(self) -> int:
        return sum(len(text) for _, text in self.topics)

    def items(self) -> Iterator[Item]:
        for topic, text in self.topics:
            yield make_document(self.source, f"topics/{topic}", text, f"topics/{topic}")
