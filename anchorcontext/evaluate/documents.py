"""Whole held-out documents, put together again from the windows of the validation split."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..data.store import ANCHOR_DOCUMENT, COPY_START, WindowDataset, WindowRecord


@dataclass(frozen=True)
class _Run:
    """Tokens ``start`` to ``start + length`` of a document, at ``place`` of a window."""

    start: int
    length: int
    window: int
    place: int


class HeldOutDocuments:
    """The documents of a split by their numbers: tokens alone, without anchors and tags.

    A document that packing cut over several windows is whole again, up to the first token that no
    window holds. Opening it reads the edges of all segments, not the tokens.
    """

    def __init__(self, dataset: WindowDataset) -> None:
        self._dataset = dataset
        found: dict[int, list[_Run]] = defaultdict(list)
        for index, record in enumerate(dataset):
            for number, run in _runs(record, index):
                found[number].append(run)
        self._runs = {number: _connected(runs) for number, runs in sorted(found.items())}
        self.lengths = {
            number: sum(run.length for run in runs) for number, runs in self._runs.items()
        }
        """Document number -> tokens."""

    @property
    def path(self) -> Path:
        """The prepared folder."""
        return self._dataset.path

    @property
    def longest(self) -> int:
        """Tokens of the longest document; 0 without any."""
        return max(self.lengths.values(), default=0)

    def tokens(self, number: int, most: int | None = None) -> np.ndarray:
        """The first ``most`` tokens of a document, int64; all of them by default."""
        parts, left = [], self.lengths[number] if most is None else most
        for run in self._runs[number]:
            record = self._dataset[run.window]
            parts.append(record.input_ids[run.place : run.place + min(run.length, left)])
            left -= len(parts[-1])
            if left <= 0:
                break
        return np.concatenate(parts).astype(np.int64)

    def long_ones(self, tokens: int, count: int) -> list[np.ndarray]:
        """The first ``count`` documents of at least so many tokens, cut to them."""
        numbers = [number for number, length in self.lengths.items() if length >= tokens]
        return [self.tokens(number, tokens) for number in numbers[:count]]

    def text(self, tokens: int) -> np.ndarray:
        """The documents one after the other, int64: at least so many tokens, or all there are."""
        parts, total = [np.zeros(0, dtype=np.int64)], 0
        for number in self.lengths:
            if total >= tokens:
                break
            parts.append(self.tokens(number))
            total += len(parts[-1])
        return np.concatenate(parts)


def _runs(record: WindowRecord, window: int) -> list[tuple[int, _Run]]:
    tags = record.tags
    places = record.cu_seqlens[:-1] + tags
    lengths = np.diff(record.cu_seqlens) - tags
    own = (record.documents != ANCHOR_DOCUMENT) & (record.starts != COPY_START)
    return [
        (int(number), _Run(int(start), int(length), window, int(place)))
        for number, start, length, place in zip(
            record.documents[own], record.starts[own], lengths[own], places[own], strict=True
        )
    ]


def _connected(runs: list[_Run]) -> list[_Run]:
    """The runs from the document's first token on, as far as each begins where the last ended."""
    kept, end = [], 0
    for run in sorted(runs, key=lambda run: run.start):
        if run.start != end:
            break
        kept.append(run)
        end += run.length
    return kept
