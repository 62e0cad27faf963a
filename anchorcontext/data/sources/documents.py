"""What a corpus gives: documents, and problems where something could not become one.

A source decides nothing about problems: whoever reads decides whether they stop a run or are
counted and left out, with a :class:`ProblemLog`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ...errors import UserError

# A stop names more than the first problem, but must not read a whole corpus to find the others.
MAX_EXAMPLES = 10
LOOK_AHEAD_DOCUMENTS = 10_000


@dataclass(frozen=True)
class Document:
    """One text, or the token ids of one. ``name`` finds it again within its source.

    ``source`` is the name its shares are counted under; ``ids`` int32 (n,) of a document that was
    tokenised elsewhere, whose ``text`` is then empty.
    """

    source: str
    name: str
    text: str = ""
    ids: np.ndarray | None = None


@dataclass(frozen=True)
class Problem:
    """Something in a source that is no document: ``location`` is ``file`` or ``file:line``."""

    source: str
    location: str
    kind: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.location}: {self.kind}" + (f" ({self.detail})" if self.detail else "")


Item = Document | Problem


class Chunk(Protocol):
    """A run of consecutive entries of one source: small enough to keep, and to send to a process.

    Where chunks begin and end depends on the corpus alone, never on who reads them.
    """

    @property
    def size(self) -> int:
        """Bytes of the corpus that it stands for."""

    @property
    def after(self) -> Position:
        """Where the next chunk of the source begins."""

    def items(self) -> Iterator[Item]:
        """Its documents and problems, in order."""


Position = tuple[int, ...]
"""A place in a source, of meaning to the source alone; ``()`` is its beginning."""


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


def sift(items: Iterable[Item], log: ProblemLog) -> Iterator[Document]:
    """The documents among ``items``; problems go to ``log``.

    Raises:
        UserError: there is a problem and ``log.on_error`` is ``"stop"``; the message names it and
            those after it, up to ten.
    """
    rest = iter(items)
    for item in rest:
        if isinstance(item, Document):
            yield item
            continue
        log.problems.append(item)
        if log.on_error == "stop":
            raise UserError(_stop_message(log, rest))


def _stop_message(log: ProblemLog, rest: Iterator[Item]) -> str:
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


def make_document(source: str, name: str, text: str, location: str) -> Item:
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
