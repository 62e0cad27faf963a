"""The plan of one rank as data: what is held, sent, received and computed, step by step.

A rank attends in steps. Before step s it holds a *buffer* of key rows; while it computes the
step's tiles, the rows of step s+1 travel. In backward the same buffers travel again and each step
returns the gradients of the foreign rows it used to their owners.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from anchorcontext.kernels.interface import Tiles


@dataclass(frozen=True, eq=False)
class Rows:
    """A selection of rows of one buffer: disjoint intervals, int64 (m, 2), in order.

    ``cache`` holds what an executor derives from it (the index tensor on a device).
    """

    intervals: np.ndarray
    cache: dict = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, start: np.ndarray, size: np.ndarray) -> Rows:
        """The rows ``start .. start + size - 1`` of each pair, neighbours joined."""
        start, stop = np.asarray(start, np.int64), np.asarray(start + size, np.int64)
        if not len(start):
            return cls(np.zeros((0, 2), dtype=np.int64))
        touch = start[1:] == stop[:-1]
        first, last = np.r_[True, ~touch], np.r_[~touch, True]
        return cls(np.stack([start[first], stop[last]], axis=1))

    @property
    def num_rows(self) -> int:
        """How many rows are selected."""
        return int((self.intervals[:, 1] - self.intervals[:, 0]).sum())

    def covers(self, num_rows: int) -> bool:
        """Whether these are all rows of a buffer of ``num_rows``, in order."""
        return self.intervals.tolist() == [[0, num_rows]]


@dataclass(frozen=True, eq=False)
class Message:
    """Rows that travel between this rank and ``peer`` (a rank of the SP group)."""

    peer: int
    rows: Rows


@dataclass(frozen=True, eq=False)
class Transfer:
    """What this rank sends and receives in one exchange. Never an empty message."""

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()

    @property
    def busy(self) -> bool:
        """Whether this rank has a part in it."""
        return bool(self.sends or self.receives)

    @property
    def rows_sent(self) -> int:
        """Rows leaving this rank."""
        return sum(message.rows.num_rows for message in self.sends)

    @property
    def rows_received(self) -> int:
        """Rows reaching this rank."""
        return sum(message.rows.num_rows for message in self.receives)


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a rank.

    ``incoming`` fills the step's key buffer: its sends select rows of the buffer held *before* the
    step, its receives name the rows of the new buffer. Step 0 holds the rank's own rows: nothing
    comes in. ``kept`` names rows of the rank's own that are copied into the buffer, and where to;
    their gradients are added at home. ``returns`` brings gradients home: its sends select rows of
    the step's buffer, its receives the rank's own rows they are added to.
    """

    num_rows: int
    tiles: Tiles
    incoming: Transfer = Transfer()
    returns: Transfer = Transfer()
    kept: tuple[Rows, Rows] | None = None
    held: np.ndarray | None = None
    """int64 (n,): the pieces (:class:`~.pieces.Pieces`) that lie in the buffer, one behind the
    other; None: it is the rank's own rows."""


@dataclass(frozen=True, eq=False)
class Anchors:
    """How the anchors of a micro-batch reach this rank and whose queries they serve.

    There are ``num_anchors`` anchors, one a window in mode ``anchor``, in window order.
    ``own`` maps anchors this rank holds to its rows: int64 (a, 2) ``anchor, row``. ``broadcast``'s
    sends select rows of the rank's own keys, its receives anchors by number. ``queries`` int64
    (m, 3) ``anchor, q_start, q_stop``: the local query rows that see the anchor by the rank-1 merge
    (all but those of the anchor's own document).
    """

    num_anchors: int
    own: np.ndarray
    queries: np.ndarray
    broadcast: Transfer = Transfer()


@dataclass(frozen=True, eq=False)
class RankPlan:
    """Everything rank ``rank`` of an SP group does for one micro-batch, in every layer."""

    rank: int
    sp_size: int
    num_rows: int
    """Local rows: windows x tokens a rank holds of each."""
    steps: tuple[Step, ...]
    anchors: Anchors

    @property
    def num_pairs(self) -> int:
        """Visible (query, key) pairs this rank computes, the anchor's included."""
        queries = self.anchors.queries
        return sum(step.tiles.num_pairs for step in self.steps) + int(
            (queries[:, 2] - queries[:, 1]).sum()
        )

    @property
    def forward_rows_sent(self) -> int:
        """Key rows this rank sends in one forward of one layer, anchors included."""
        return sum(s.incoming.rows_sent for s in self.steps) + self.anchors.broadcast.rows_sent

    @property
    def return_rows_sent(self) -> int:
        """Gradient rows this rank returns to their owners in one backward of one layer."""
        return sum(s.returns.rows_sent for s in self.steps) + self.anchors.broadcast.rows_received

    def bytes_sent(
        self, row_elements: int, element_size: int, gradient_size: int
    ) -> dict[str, int]:
        """Bytes this rank sends in one layer: ``forward`` and ``backward``.

        ``row_elements`` = 2 * Hkv * D: a row carries key and value. Backward moves the keys again
        (they are not stored) and returns gradients of ``gradient_size`` bytes an element.
        """
        keys = self.forward_rows_sent * row_elements * element_size
        gradients = self.return_rows_sent * row_elements * gradient_size
        return {"forward": keys, "backward": keys + gradients}
