"""What packing works on and what it gives: documents as lengths, segments, windows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Documents:
    """What a packer is given: D documents in stream order; all arrays int64 (D,), lengths positive.

    In a window every segment of document d stands behind ``first[d]`` tokens that are not its own
    (a tag, a copy of the anchor) if it begins the document, ``again[d]`` if it continues it.
    """

    lengths: np.ndarray
    first: np.ndarray
    again: np.ndarray

    def __getitem__(self, chosen: np.ndarray) -> Documents:
        """The documents of these numbers."""
        return Documents(self.lengths[chosen], self.first[chosen], self.again[chosen])

    @property
    def sizes(self) -> np.ndarray:
        """(D,) the room that each whole document takes."""
        return self.first + self.lengths

    def front(self, segments: Segments) -> np.ndarray:
        """(S,) the tokens in front of each segment."""
        begins = segments.starts == 0
        return np.where(begins, self.first[segments.documents], self.again[segments.documents])


@dataclass(frozen=True)
class Segments:
    """S runs of document tokens in window order; all arrays int64.

    Segment s is the tokens ``starts[s] : starts[s] + lengths[s]`` of document ``documents[s]``;
    window w holds the segments ``offsets[w] : offsets[w + 1]`` (W + 1 offsets).
    """

    documents: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray

    @property
    def windows(self) -> np.ndarray:
        """(S,) the window of each segment."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def keep_windows(self, kept: np.ndarray) -> tuple[Segments, Segments]:
        """The segments of the windows where ``kept`` (W,) is true, and all others."""
        return self._of_windows(kept), self._of_windows(~kept)

    def _of_windows(self, chosen: np.ndarray) -> Segments:
        counts = np.diff(self.offsets)
        mine = np.repeat(chosen, counts)
        return Segments(
            self.documents[mine],
            self.starts[mine],
            self.lengths[mine],
            np.cumsum(np.r_[0, counts[chosen]]),
        )


def distinct(*arrays: np.ndarray) -> np.ndarray:
    """The values of integer arrays, sorted, each once.

    Merging runs that are sorted already takes a tenth of the time of ``np.unique``'s hash table.
    """
    values = np.sort(np.concatenate(arrays), kind="stable")
    return values[np.diff(values, prepend=values[:1] - 1) != 0]


@dataclass(frozen=True)
class Dropped:
    """Tokens left out for one reason: ``tokens[i]`` of document ``documents[i]``, both int64."""

    documents: np.ndarray
    tokens: np.ndarray

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.sum())

    @property
    def num_documents(self) -> int:
        """Documents that lost tokens."""
        return len(np.unique(self.documents))
