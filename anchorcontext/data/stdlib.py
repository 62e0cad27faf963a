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

from ..errors import UserError
from .sources import (
    Document,
    Problem,
    digest_files,
    list_files,
    make_document,
    matches,
    read_text_file,
)

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

    def _code(self) -> list[Path]:
        return list_files(self.root, "*.py", without=LEFT_OUT)

    def files(self) -> list[Path]:
        return [*self._code(), *self.root.glob("pydoc_data/topics.py")]

    def digest(self) -> dict[str, Any]:
        return digest_files(self.root, self.files())

    def read(self) -> Iterator[Document | Problem]:
        prefix = f"{self.name}/" if self.name else ""
        for path in self._code():
            inside = path.relative_to(self.root).as_posix()
            if self._selected(inside):
                item = read_text_file(path, f"{prefix}code", inside)
                if isinstance(item, Document) or item.kind != "empty document":
                    yield item
        for topic, text in self._topics():
            if self._selected(f"topics/{topic}"):
                yield make_document(f"{prefix}prose", f"topics/{topic}", text, f"topics/{topic}")

    def _topics(self) -> list[tuple[str, str]]:
        try:
            topics = importlib.import_module("pydoc_data.topics").topics
        except ImportError:
            logger.warning("this Python has no pydoc_data.topics: the corpus has no prose")
            return []
        return sorted(topics.items())

    def _selected(self, name: str) -> bool:
        return self.pattern is None or matches(name, self.pattern)
