"""Rows (of JSON lines, of tables) to documents: which field is the text, the tokens, the source.

A row that was tokenised elsewhere holds its ids under ``tokens_field``, and may say under
``source`` which runs of them are whose: ``[{source, start, end}, ...]``, the form of the
length-upsampled SlimPajama of Fu et al. (arXiv 2402.10171). Every run is a document; ids between
runs, or of a row without them, are a document of the row's own source, so all of a row is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .documents import Document, Item, Problem, make_document

SPANS_FIELD = "source"
MISSING = object()


@dataclass(frozen=True)
class RowReader:
    """How the rows of one source become documents.

    ``text_field`` and ``source_field`` may be dotted (``meta.redpajama_set_name``). With
    ``source_field`` a document counts under ``source/VALUE``.
    """

    source: str
    text_field: str = "text"
    source_field: str | None = None
    tokens_field: str | None = None

    @property
    def fields(self) -> list[tuple[str, bool]]:
        """The fields that are read, and whether a row may lack one."""
        fields = [(self.tokens_field or self.text_field, False)]
        if self.source_field is not None:
            fields.append((self.source_field, False))
        if self.tokens_field is not None:
            fields.append((SPANS_FIELD, True))
        return fields

    def items(self, row: Mapping[str, Any], location: str, name: str) -> Iterator[Item]:
        """The documents of one row, or the reason why it is none."""
        source = self.source
        if self.source_field is not None:
            value = _field(row, self.source_field)
            if not isinstance(value, str) or not value:
                detail = f"source_field is {self.source_field!r}"
                yield Problem(self.source, location, "no source field", detail)
                return
            source = f"{self.source}/{value}"
        if self.tokens_field is not None:
            yield from self._tokenised(row, self.tokens_field, source, location, name)
        else:
            yield self._text(row, source, location, name)

    def _text(self, row: Mapping[str, Any], source: str, location: str, name: str) -> Item:
        text = _field(row, self.text_field)
        if text is MISSING:
            fields = ", ".join(map(repr, list(row)[:5])) or "none"
            detail = f"text_field is {self.text_field!r}, the row has {fields}"
            return Problem(source, location, "no text field", detail)
        if not isinstance(text, str):
            detail = f"{self.text_field!r} is a {type(text).__name__}"
            return Problem(source, location, "text is not a string", detail)
        return make_document(source, name, text, location)

    def _tokenised(
        self, row: Mapping[str, Any], field: str, source: str, location: str, name: str
    ) -> Iterator[Item]:
        ids = _token_ids(_field(row, field))
        if ids is None:
            detail = f"{field!r} is no list of token ids"
            yield Problem(source, location, "no token ids", detail)
            return
        if not len(ids):
            yield Problem(source, location, "empty document")
            return
        runs = _runs(row.get(SPANS_FIELD), len(ids), source)
        if isinstance(runs, str):
            yield Problem(source, location, "wrong spans", runs)
            return
        for owner, start, end in runs:
            part = f"{name}[{start}:{end}]" if end - start < len(ids) else name
            yield Document(owner, part, ids=ids[start:end])


def _field(row: Any, dotted: str) -> Any:
    if isinstance(row, Mapping) and dotted in row:
        return row[dotted]
    for part in dotted.split("."):
        if not isinstance(row, Mapping) or part not in row:
            return MISSING
        row = row[part]
    return row


def _token_ids(value: Any) -> np.ndarray | None:
    """int32 (n,), or None: not a flat list of integers that int32 holds."""
    if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray):
        return None
    try:
        ids = np.asarray(value if len(value) else np.zeros(0, dtype=np.int32))
    except (ValueError, OverflowError):
        return None
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        return None
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < 1 << 31):
        return None
    return ids.astype(np.int32)


def _runs(spans: Any, length: int, source: str) -> list[tuple[str, int, int]] | str:
    """(source, start, end) of every document of a row, covering it; or what is wrong."""
    if not isinstance(spans, Sequence) or isinstance(spans, str):
        return [(source, 0, length)]
    runs: list[tuple[str, int, int]] = []
    done = 0
    for span in spans:
        try:
            owner, start, end = span["source"], int(span["start"]), int(span["end"])
        except (TypeError, KeyError, ValueError):
            return f"{span!r} is not {{source, start, end}}"
        if not isinstance(owner, str) or not done <= start < end <= length:
            return f"{owner!r} {start}:{end} after {done}, in a row of {length} tokens"
        if start > done:
            runs.append((source, done, start))
        runs.append((f"{source}/{owner}", start, end))
        done = end
    if done < length:
        runs.append((source, done, length))
    return runs
