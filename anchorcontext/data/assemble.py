"""Windows as records: the tokens of a packing's segments, fetched from the tokenised corpus."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .fronts import Fronts
from .packing import Packing
from .store import ANCHOR_DOCUMENT, COPY_START, WindowRecord
from .tokens import TokenisedCorpus


def window_records(
    packing: Packing,
    documents: np.ndarray,
    corpus: TokenisedCorpus,
    anchor_id: int | None,
    fronts: Fronts,
) -> Iterator[WindowRecord]:
    """The windows of ``packing`` in order.

    ``documents`` int64 (D,): the number in ``corpus`` of every document that was packed;
    ``fronts``: what stands in front of each, once in a window. Without copies of the anchor, it
    stands in front of the window.
    """
    segments = packing.segments
    for window in range(packing.num_windows):
        rows = slice(segments.offsets[window], segments.offsets[window + 1])
        numbers, starts = documents[segments.documents[rows]], segments.starts[rows]
        opens = np.zeros(len(numbers), dtype=bool)
        opens[np.unique(numbers, return_index=True)[1]] = True
        copied = opens & fronts.copied(starts)
        runs = _Runs()
        if packing.anchor:
            assert anchor_id is not None
            runs.add_anchor(anchor_id, ANCHOR_DOCUMENT, 0)
        for number, start, length, opening, copy in zip(
            numbers.tolist(),
            starts.tolist(),
            segments.lengths[rows].tolist(),
            opens.tolist(),
            copied.tolist(),
            strict=True,
        ):
            if copy:
                assert anchor_id is not None
                runs.add_anchor(anchor_id, number, COPY_START)
            tag = fronts.tag(int(corpus.sources[number])) if opening else NO_TAG
            runs.add(corpus.ids(number, start, length), number, start, tag)
        yield runs.record()


NO_TAG = np.zeros(0, dtype=np.int32)


class _Runs:
    """The runs of one window, one after the other."""

    def __init__(self) -> None:
        self._ids: list[np.ndarray] = []
        self._rows: list[tuple[int, int, int, int]] = []

    def add_anchor(self, anchor_id: int, document: int, start: int) -> None:
        self.add(np.array([anchor_id], dtype=np.int32), document, start, NO_TAG)

    def add(self, ids: np.ndarray, document: int, start: int, tag: np.ndarray) -> None:
        self._ids += [tag, ids] if len(tag) else [ids]
        self._rows.append((len(tag) + len(ids), document, start, len(tag)))

    def record(self) -> WindowRecord:
        lengths, documents, starts, tags = np.array(self._rows, dtype=np.int64).T
        edges = np.r_[0, np.cumsum(lengths)]
        return WindowRecord(np.concatenate(self._ids), edges, documents, starts, tags)
