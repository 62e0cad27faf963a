"""From windows to a plan: layout, pieces, needs, and each rank's steps."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from ..errors import UserError
from ..window import Window
from .anchors import plan_anchors
from .choice import Choice, choose_exchange
from .cost import CostModel
from .exact import exact_steps
from .gather import gather_steps
from .heads import heads_per_rank
from .layout import layout_runs, padded_length, resolve_layout
from .pieces import Pieces, make_pieces, needed
from .ring import ring_steps
from .runs import local_indices, split_runs
from .steps import RankPlan

ROW_EXCHANGES = {"ring": ring_steps, "gather": gather_steps}
EXCHANGES = (*ROW_EXCHANGES, "ulysses", "hybrid")


class BatchPlan:
    """The plan of one micro-batch for all ranks of an SP group; pure data, no communication.

    Every rank builds it from the same windows and reads its own part with :meth:`rank`; nothing
    has to be agreed on.

    With ``ulysses`` = U > 1, U neighbouring ranks swap tokens for heads before attention: together
    they hold the tokens of all U, each for 1/U of the heads. Attention then runs among P/U such
    *teams*, each a rank of the row exchange; pieces, needs and steps are those of teams.

    Args:
        windows: the micro-batch, one or more windows. Shorter ones are padded on the right to the
            length of the longest, and all of them to what the layout divides.
        sp_size: P, the ranks that share a window.
        layout: ``"contiguous"``, ``"zigzag"``, ``"balanced"`` or ``"auto"``.
        exchange: ``"ring"``, ``"gather"``, ``"ulysses"`` (U = P), ``"hybrid"`` (U as given, ring
            among the teams) or ``"auto"`` (:mod:`~anchorcontext.plan.choice`).
        ulysses: U; also with ``"ring"`` and ``"gather"``, the exchange among the teams.
        cost: what ``balanced`` and ``auto`` minimise; the same on all ranks.
        exact: forward has the same bits for every P (:mod:`~anchorcontext.plan.exact`); rows travel
            by ``"gather"``.

    Raises:
        UserError: no windows, an unknown layout or exchange, a U that does not divide P, or
            ``exact`` with a ring.
    """

    def __init__(
        self,
        windows: Sequence[Window],
        sp_size: int,
        layout: str = "auto",
        exchange: str = "auto",
        ulysses: int = 1,
        cost: CostModel | None = None,
        exact: bool = False,
    ) -> None:
        if not windows:
            raise UserError("windows is empty: a micro-batch holds at least one window")
        if sp_size < 1:
            raise UserError(f"sp_size = {sp_size}: at least one rank holds the window")
        self.windows = tuple(windows)
        self.sp_size = sp_size
        self.exact = exact
        self.length = max(window.num_tokens for window in windows)
        self.exchange, ulysses = _resolve_exchange(exchange, ulysses, sp_size, exact)
        self._lay_out(layout, ulysses, cost)
        self.choice: Choice | None = None
        if self.exchange == "auto":
            self._choose(layout, cost)
        self._ranks: dict[int, RankPlan] = {}

    def _lay_out(self, layout: str, ulysses: int, cost: CostModel | None) -> None:
        """Share the windows among teams of ``ulysses`` ranks."""
        self.ulysses, self.num_teams = ulysses, self.sp_size // ulysses
        self.layouts = tuple(
            resolve_layout(layout, window, self.num_teams) for window in self.windows
        )
        self.padded_length = max(
            padded_length(self.length, name, self.sp_size, self.num_teams) for name in self.layouts
        )
        self.team_runs = tuple(
            layout_runs(name, window, self.padded_length, self.num_teams, cost)
            for name, window in zip(self.layouts, self.windows, strict=True)
        )
        self.runs = tuple(split_runs(runs, self.ulysses) for runs in self.team_runs)

    def _choose(self, layout: str, cost: CostModel | None) -> None:
        """Decide ``auto``, laid out for an exchange of rows so far."""
        self.exchange = "gather"
        if self.num_teams == 1:
            return
        token_rows = self.batch_size * -(-self.length // self.sp_size)
        cost = cost or CostModel()
        swap = self.ulysses == 1
        share = cost if swap else cost.share_of_heads(self.ulysses)
        choice = choose_exchange(self.pieces, self.need, token_rows, share, swap)
        if choice.exchange == "ulysses":
            del self.pieces, self.need  # of the other layout
            self._lay_out(layout, self.sp_size, cost)
        else:
            self.exchange = choice.exchange
        self.choice = choice

    @property
    def batch_size(self) -> int:
        """B, the number of windows."""
        return len(self.windows)

    @property
    def layout(self) -> str:
        """The layout of the windows; of each kind, where their modes differ."""
        return "+".join(sorted(set(self.layouts)))

    @property
    def local_length(self) -> int:
        """S, tokens of each window that a rank holds."""
        return self.padded_length // self.sp_size

    @cached_property
    def pieces(self) -> Pieces:
        """The micro-batch cut at documents and the teams' runs."""
        return make_pieces(self.windows, self.team_runs, self.padded_length)

    @cached_property
    def need(self) -> np.ndarray:
        """bool (P / U, n): which team needs which foreign piece."""
        return needed(self.pieces, self.num_teams)

    @property
    def exchange_name(self) -> str:
        """The exchange as a user would ask for it."""
        if self.ulysses == 1:
            return self.exchange
        return "ulysses" if self.num_teams == 1 else f"ulysses {self.ulysses} + {self.exchange}"

    def local_indices(self, rank: int, window: int) -> np.ndarray:
        """int64 (S,): the tokens of a padded window that ``rank`` holds, in row order."""
        return local_indices(self.runs[window], rank)

    def rank(self, rank: int) -> RankPlan:
        """What ``rank`` does as a member of its team."""
        team = rank // self.ulysses
        if team not in self._ranks:
            num_rows = self.batch_size * self.local_length * self.ulysses
            make_steps = exact_steps if self.exact else ROW_EXCHANGES[self.exchange]
            steps = make_steps(self.pieces, self.need, team, num_rows)
            anchors = plan_anchors(self.pieces, self.windows, self.num_teams, team)
            self._ranks[team] = RankPlan(team, self.num_teams, num_rows, steps, anchors)
        return self._ranks[team]

    def key_tokens(self, rank: int) -> tuple[np.ndarray, ...]:
        """For each step of ``rank``, int64 (M,): the token of every row of its key buffer.

        Token t of window w is ``w * padded_length + t``. Step 0's are the rank's own rows (with
        ulysses its team's), and so its queries.
        """
        team, pieces = rank // self.ulysses, self.pieces
        own = np.concatenate(
            [
                local_indices(runs, team) + window * self.padded_length
                for window, runs in enumerate(self.team_runs)
            ]
        )
        found = []
        for step in self.rank(rank).steps:
            if step.held is None:
                found.append(own)
                continue
            size = pieces.size[step.held]
            into_piece = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
            found.append(np.repeat(pieces.start[step.held], size) + into_piece)
        return tuple(found)

    def bytes_sent(
        self,
        rank: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        element_size: int,
        gradient_size: int = 4,
        forwards: int = 1,
        backwards: int = 1,
        swaps: int | None = None,
    ) -> int:
        """Bytes ``rank`` sends in ``forwards`` and ``backwards`` of attention layers.

        ``swaps``: forwards in which ulysses swaps, where they are more than those that exchange
        keys: a layer that is recomputed with its attention kept swaps again.

        ``element_size`` is of queries, keys and values, ``gradient_size`` of the key gradients that
        go back to their owners (4: fp32). What the run counts is equal to it, to the byte.
        """
        heads, kv_heads = heads_per_rank(num_heads, num_kv_heads, self.ulysses)
        rows = self.rank(rank).bytes_sent(2 * kv_heads * head_dim, element_size, gradient_size)
        # Ulysses swaps queries, keys and values in, outputs out; backward swaps their gradients.
        local_rows = self.batch_size * self.local_length
        swapped = (self.ulysses - 1) * local_rows * (2 * heads + 2 * kv_heads) * head_dim
        swaps = (forwards if swaps is None else swaps) + backwards
        return (
            forwards * rows["forward"]
            + backwards * rows["backward"]
            + swaps * swapped * element_size
        )


def _resolve_exchange(exchange: str, ulysses: int, sp_size: int, exact: bool) -> tuple[str, int]:
    """The row exchange among teams and the team size that a user's words stand for."""
    if exchange != "auto" and exchange not in EXCHANGES:
        near = difflib.get_close_matches(exchange, EXCHANGES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"exchange {exchange!r}: must be one of auto, {', '.join(EXCHANGES)}{hint}")
    if ulysses < 1 or sp_size % ulysses:
        divisors = [n for n in range(1, sp_size + 1) if sp_size % n == 0]
        raise UserError(f"ulysses = {ulysses} with sp = {sp_size}: use a divisor of sp, {divisors}")
    if exchange == "hybrid" and not 1 < ulysses < sp_size:
        raise UserError(
            f"exchange 'hybrid' with ulysses = {ulysses} and sp = {sp_size}: give ulysses, the "
            "ranks that swap heads, a divisor of sp between 1 and sp"
        )
    if exact and exchange in ("ring", "hybrid"):
        raise UserError(
            f"exchange {exchange!r} with exact: a ring merges keys in the order of the ranks, and "
            "every sp rounds differently; use exchange 'gather' or 'ulysses', or leave exact out"
        )
    if exchange == "ulysses":
        if ulysses not in (1, sp_size):
            raise UserError(
                f"exchange 'ulysses' with ulysses = {ulysses} and sp = {sp_size}: all sp ranks "
                "swap heads; leave ulysses out, or use exchange 'hybrid'"
            )
        return ("gather" if exact else "ring"), sp_size
    if exact:
        return "gather", ulysses
    return ("ring" if exchange == "hybrid" else exchange), ulysses
