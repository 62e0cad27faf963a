"""Windows as records: the tokens of a packing's segments, fetched from the tokenised corpus."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .packing import Packing
from .store import ANCHOR_DOCUMENT, WindowRecord
from .tokens import TokenisedCorpus


def window_records(
    packing: Packing, documents: np.ndarray, corpus: TokenisedCorpus, anchor_id: int | None
) -> Iterator[WindowRecord]:
    """The windows of ``packing`` in order, each behind the anchor.

    ``documents`` int64 (D,): the number in ``corpus`` of every document that was packed.
    """
    segments = packing.segments
    for window in range(packing.num_windows):
        rows = slice(segments.offsets[window], segments.offsets[window + 1])
        numbers = documents[segments.documents[rows]]
        starts, lengths = segments.starts[rows], segments.lengths[rows]
        parts = [
            corpus.ids(*run)
            for run in zip(numbers.tolist(), starts.tolist(), lengths.tolist(), strict=True)
        ]
        if anchor_id is not None:
            parts.insert(0, np.array([anchor_id], dtype=np.int32))
            numbers, starts, lengths = (
                np.r_[first, array]
                for first, array in ((ANCHOR_DOCUMENT, numbers), (0, starts), (1, lengths))
            )
        yield WindowRecord(np.concatenate(parts), np.r_[0, np.cumsum(lengths)], numbers, starts)
