"""``exchange: auto``: the exchange with the shortest modelled time whose buffers fit.

For a micro-batch that is cut into pieces, all of this is closed form over (ranks x pieces):

* ``gather`` moves the least rows, in one message a peer; they hide behind the attention over the
  rank's own keys alone, and all of them are held at once.
* ``ring`` moves a row over every hop up to its farthest reader; the rows of a step hide behind the
  attention of the step before, and two steps' rows are held at a time.
* ``ulysses`` gives every rank the same attention work whatever the layout. It swaps queries, keys,
  values and outputs of every token, and nothing hides that.

Packed documents need few rows, so ``gather`` wins there; in mode ``full``, where a rank needs
nearly the whole window, ``ring`` does from a few ranks on, or ``ulysses`` where the links are fast
or keys wide.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from .cost import CostModel
from .heads import heads_divide, heads_per_rank
from .pieces import Pieces
from .ring import ring_arrivals
from .tiling import tile_counts

CLOSE = 1.01
"""Times nearer than this count as equal: the smaller buffers decide, and ulysses, which without
gradient checkpointing also stores its swapped tensors in every layer, comes last."""

_logger = logging.getLogger(__name__)
_told: set[str] = set()


@dataclass(frozen=True)
class Candidate:
    """One exchange; of the rank with the most of each, one layer and one training step."""

    exchange: str
    bytes_sent: float
    """Without the anchor's row."""
    rows_held: int
    """Foreign key rows held and arriving at one time; with ulysses, rows of 1 / P of the heads."""
    buffer_bytes: float
    """What these rows, and the gradients of one step's, take."""
    exposed_seconds: float
    """Travel that does not hide behind attention."""
    seconds: float
    """Attention and exposed travel."""


@dataclass(frozen=True)
class Choice:
    """What ``auto`` became, and why."""

    exchange: str
    reason: str
    candidates: tuple[Candidate, ...]


def choose_exchange(
    pieces: Pieces, need: np.ndarray, token_rows: int, cost: CostModel, swap: bool = True
) -> Choice:
    """``gather``, ``ring`` or ``ulysses`` for a micro-batch; each choice is logged once.

    Args:
        pieces: of the micro-batch, laid out for an exchange of rows.
        need: bool (P, n), which rank needs which foreign piece.
        token_rows: rows of one rank under ulysses: windows x the longest window / P.
        cost: of a layer; without its heads ulysses is no candidate.
        swap: whether ulysses is a candidate at all: not where heads are swapped already.
    """
    sp_size = len(need)
    work = _Work(pieces, need)
    candidates = [_gather(work, cost), _ring(work, cost)]
    left_out = _why_no_ulysses(cost, sp_size) if swap else "heads are swapped in teams"
    if not left_out:
        candidates.append(_ulysses(work, cost, token_rows))
    fitting = [c for c in candidates if c.buffer_bytes <= cost.exchange_memory]
    if fitting:
        close = CLOSE * min(candidate.seconds for candidate in fitting)
        near = [candidate for candidate in fitting if candidate.seconds <= close]
        best = min(near, key=lambda c: (c.exchange == "ulysses", c.buffer_bytes))
        why = "fastest" if len(near) == 1 else "as fast as any, in the smallest buffers"
        if len(fitting) < len(candidates):
            why += f" that fits into {_size(cost.exchange_memory)}"
    else:
        best = min(candidates, key=lambda candidate: candidate.buffer_bytes)
        why = f"smallest buffers, none fits into {_size(cost.exchange_memory)}"
    told = [_describe(candidate) for candidate in candidates]
    told += [f"no ulysses: {left_out}"] if left_out else []
    choice = Choice(best.exchange, f"{best.exchange}: {why}; {'; '.join(told)}", tuple(candidates))
    if choice.exchange not in _told:
        _told.add(choice.exchange)
        _logger.info("exchange auto over %d ranks, a layer's step: %s", sp_size, choice.reason)
    return choice


class _Work:
    """Pairs and rows of every rank, by distance d from their owner: ``[d, r]`` is what rank r
    computes with, or receives of, keys of rank r - d (mod P)."""

    def __init__(self, pieces: Pieces, need: np.ndarray) -> None:
        self.pieces, self.need = pieces, need
        self.sp_size, num = need.shape
        size, owner = pieces.size, pieces.owner
        # held[r, i]: tokens of piece i on rank r; pieces document by document, in token order.
        order = np.lexsort((pieces.start, pieces.group))
        held = np.zeros((self.sp_size, num), dtype=np.int64)
        held[owner[order], np.arange(num)] = size[order]
        group = pieces.group[order]
        until = np.cumsum(held, axis=1)
        last = np.searchsorted(group, group, side="right") - 1
        queries = np.empty_like(until)
        queries[:, order] = until[:, last] - until  # of rank r, behind the piece in its document
        self.pairs = self._by_distance(queries * size)
        self.pairs[0] += np.bincount(owner, weights=size * (size + 1) / 2, minlength=self.sp_size)
        self.rows = self._by_distance(need * size)
        """Rows needed."""
        self.num_groups = int(pieces.group.max()) + 1

    def _by_distance(self, values: np.ndarray) -> np.ndarray:
        """float64 (P, P): values (ranks x pieces) summed over the pieces of each owner."""
        rank, piece = np.nonzero(values)
        distance = (rank - self.pieces.owner[piece]) % self.sp_size
        sums = np.bincount(
            distance * self.sp_size + rank,
            weights=values[rank, piece],
            minlength=self.sp_size**2,
        )
        # Without any entry bincount gives integers, whatever the weights.
        return sums.astype(np.float64).reshape(self.sp_size, self.sp_size)

    def returned(self) -> np.ndarray:
        """(P, P): ``[d, r]`` rows of rank r that rank r + d uses, and returns gradients of."""
        distance = np.arange(self.sp_size)[:, None]
        user = (np.arange(self.sp_size) + distance) % self.sp_size
        return self.rows[distance, user]


def _gather(work: _Work, cost: CostModel) -> Candidate:
    received, sent = work.rows.sum(axis=0), work.returned().sum(axis=0)
    peers = np.maximum((work.rows > 0).sum(axis=0), (work.returned() > 0).sum(axis=0))
    travel = cost.travel_seconds(np.maximum(received, sent), peers)
    own = work.pairs[0] * cost.seconds_per_pair
    return _candidate(
        "gather",
        work,
        cost,
        bytes_sent=_key_bytes(cost) * sent + cost.gradient_bytes_per_row * received,
        rows_held=received,
        step_rows=received,
        exposed=travel - np.minimum(cost.hideable * travel, own),
    )


def _ring(work: _Work, cost: CostModel) -> Candidate:
    arriving = ring_arrivals(work.pieces, work.need)
    forwarded = np.roll(arriving, -1, axis=1)  # what rank r + 1 receives, rank r sends
    returned, home = work.rows, work.returned()
    seconds = (
        _key_bytes(cost) * np.maximum(arriving, forwarded)
        + cost.gradient_bytes_per_row * np.maximum(returned, home)
    ) / cost.bytes_per_second
    busy = (arriving + forwarded) > 0
    seconds = seconds + busy * cost.messages_per_peer * cost.seconds_per_message
    attention = work.pairs * cost.seconds_per_pair
    exposed = seconds[1:] - np.minimum(cost.hideable * seconds[1:], attention[:-1])
    following = np.vstack([arriving[1:], np.zeros((1, work.sp_size), dtype=np.int64)])
    return _candidate(
        "ring",
        work,
        cost,
        bytes_sent=_key_bytes(cost) * forwarded.sum(axis=0)
        + cost.gradient_bytes_per_row * returned.sum(axis=0),
        rows_held=(arriving + following).max(axis=0),
        step_rows=arriving.max(axis=0),
        exposed=exposed.sum(axis=0),
    )


def _candidate(
    exchange: str,
    work: _Work,
    cost: CostModel,
    *,
    bytes_sent: np.ndarray,
    rows_held: np.ndarray,
    step_rows: np.ndarray,
    exposed: np.ndarray,
) -> Candidate:
    """Put together what the exchanges of rows have in common; arrays are (P,)."""
    tiles = tile_counts(work.pieces, work.sp_size, exchange)
    attention = work.pairs.sum(axis=0) * cost.seconds_per_pair + tiles * cost.seconds_per_tile
    # Keys held and arriving, their copies for sending, and gradients of one step's rows: computed,
    # on their way, and arriving.
    buffers = cost.memory_per_row * (rows_held + step_rows)
    buffers = buffers + 3 * cost.gradient_bytes_per_row * step_rows
    return Candidate(
        exchange=exchange,
        bytes_sent=float(bytes_sent.max()),
        rows_held=int(rows_held.max()),
        buffer_bytes=float(buffers.max()),
        exposed_seconds=float(exposed.max()),
        seconds=float((attention + exposed).max()),
    )


def _ulysses(work: _Work, cost: CostModel, token_rows: int) -> Candidate:
    assert cost.heads is not None
    num_heads, num_kv_heads = cost.heads
    sp_size = work.sp_size
    heads, kv_heads = heads_per_rank(num_heads, num_kv_heads, sp_size)
    swapped = (sp_size - 1) * token_rows * (2 * heads + 2 * kv_heads)  # heads of tokens
    passes = cost.messages_per_peer - 1  # forwards and one backward
    travel = swapped * cost.swap_bytes_per_head / cost.bytes_per_second
    travel += 2 * passes * (sp_size - 1) * cost.seconds_per_message
    attention = float(work.pairs.sum()) / sp_size * cost.seconds_per_pair
    attention += work.num_groups * cost.seconds_per_tile
    held = sp_size * token_rows * (2 * heads + 2 * kv_heads)
    return Candidate(
        exchange="ulysses",
        bytes_sent=float(swapped * cost.swap_bytes_per_head),
        rows_held=sp_size * token_rows,
        buffer_bytes=held * cost.memory_per_row / (2 * num_kv_heads),
        exposed_seconds=travel,
        seconds=attention + travel,
    )


def _why_no_ulysses(cost: CostModel, sp_size: int) -> str:
    """Why ulysses is no candidate; empty where it is one."""
    if cost.heads is None:
        return "the model's heads are not given"
    if not heads_divide(*cost.heads, sp_size):
        num_heads, num_kv_heads = cost.heads
        return (
            f"{num_heads} query and {num_kv_heads} key/value heads do not divide over {sp_size} "
            "ranks"
        )
    return ""


def _key_bytes(cost: CostModel) -> float:
    """Of one row's keys and values, forward and again in backward."""
    return cost.bytes_per_row - cost.gradient_bytes_per_row


def _describe(candidate: Candidate) -> str:
    return (
        f"{candidate.exchange} sends {_size(candidate.bytes_sent)}, holds "
        f"{candidate.rows_held:,} rows in {_size(candidate.buffer_bytes)}, exposes "
        f"{candidate.exposed_seconds * 1e3:.3g} ms of {candidate.seconds * 1e3:.3g} ms"
    )


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"
