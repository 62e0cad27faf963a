"""From windows to a plan: layout, pieces, needs, and each rank's steps."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from ..errors import UserError
from ..window import Window
from .anchors import plan_anchors
from .layout import check_layout, layout_runs, local_indices, padded_length
from .pieces import Pieces, make_pieces, needed
from .ring import ring_steps
from .steps import RankPlan

EXCHANGES = {"ring": ring_steps}


class BatchPlan:
    """The plan of one micro-batch for all ranks of an SP group; pure data, no communication.

    Every rank builds it from the same windows and reads its own part with :meth:`rank`; nothing
    has to be agreed on.

    Args:
        windows: the micro-batch, one or more windows. Shorter ones are padded on the right to the
            length of the longest, and all of them to what the layout divides.
        sp_size: ranks that share a window.
        layout: ``"contiguous"``, ``"zigzag"`` or ``"auto"``.
        exchange: ``"ring"`` or ``"auto"``.

    Raises:
        UserError: no windows, or an unknown layout or exchange.
    """

    def __init__(
        self, windows: Sequence[Window], sp_size: int, layout: str = "auto", exchange: str = "auto"
    ) -> None:
        if not windows:
            raise UserError("windows is empty: a micro-batch holds at least one window")
        if sp_size < 1:
            raise UserError(f"sp_size = {sp_size}: at least one rank holds the window")
        self.windows = tuple(windows)
        self.sp_size = sp_size
        self.layout = "zigzag" if layout == "auto" else layout
        self.exchange = "ring" if exchange == "auto" else exchange
        check_layout(self.layout)
        if self.exchange not in EXCHANGES:
            near = difflib.get_close_matches(self.exchange, EXCHANGES, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(
                f"exchange {exchange!r}: must be one of auto, {', '.join(EXCHANGES)}{hint}"
            )
        self.length = max(window.num_tokens for window in windows)
        self.padded_length = padded_length(self.length, self.layout, sp_size)
        self.runs = layout_runs(self.layout, self.padded_length, sp_size)
        self._ranks: dict[int, RankPlan] = {}

    @property
    def batch_size(self) -> int:
        """B, the number of windows."""
        return len(self.windows)

    @property
    def local_length(self) -> int:
        """S, tokens of each window that a rank holds."""
        return self.padded_length // self.sp_size

    @cached_property
    def pieces(self) -> Pieces:
        """The micro-batch cut at documents and runs."""
        return make_pieces(self.windows, self.runs, self.padded_length)

    @cached_property
    def need(self) -> np.ndarray:
        """bool (P, n): which rank needs which foreign piece."""
        return needed(self.pieces, self.sp_size)

    def local_indices(self, rank: int) -> np.ndarray:
        """int64 (S,): the tokens of each padded window that ``rank`` holds, in row order."""
        return local_indices(self.runs, rank)

    def rank(self, rank: int) -> RankPlan:
        """The part of ``rank``."""
        if rank not in self._ranks:
            num_rows = self.batch_size * self.local_length
            steps = EXCHANGES[self.exchange](self.pieces, self.need, rank, num_rows)
            anchors = plan_anchors(self.pieces, self.windows, self.sp_size, rank)
            self._ranks[rank] = RankPlan(rank, self.sp_size, num_rows, steps, anchors)
        return self._ranks[rank]
