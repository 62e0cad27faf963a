"""Which rank sends how many bytes to which, from the plan's pieces; exact.

The same counts as :meth:`anchorcontext.plan.RankPlan.bytes_sent`, for all pairs of ranks at once
and without writing each rank's steps: a plan of 1,024 ranks takes a second instead of minutes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..plan import BatchPlan, RingFlashAttnPlan
from ..plan.heads import heads_per_rank
from ..plan.ring import ring_arrivals
from ..watch.sizes import ModelSizes


@dataclass(frozen=True, eq=False)
class RowTraffic:
    """Key rows between the ranks of the row exchange (teams, with ulysses), per layer.

    ``forward[i, j]`` int64: rows that i sends to j in one forward, anchors included;
    ``returns[i, j]``: rows of gradients in one backward. ``messages`` (T,): transfers that a rank
    takes part in as a sender, in one forward and in the returns of one backward.
    """

    forward: np.ndarray
    returns: np.ndarray
    messages: np.ndarray
    return_messages: np.ndarray
    key_rows: np.ndarray
    """(T,): most foreign rows that a rank holds and receives at one time."""
    step_rows: np.ndarray
    """(T,): most foreign rows of one step."""


def row_traffic(plan: BatchPlan) -> RowTraffic:
    """Count the rows of a plan."""
    if isinstance(plan, RingFlashAttnPlan):
        return _unpruned_traffic(plan)
    pieces, need, teams = plan.pieces, plan.need, plan.num_teams
    least = _by_owner(need, pieces.size, pieces.owner)
    forward = np.zeros((teams, teams), dtype=np.int64)
    if plan.exchange == "ring":
        arriving = ring_arrivals(pieces, need)
        sent = np.roll(arriving.sum(axis=0), -1)
        forward[np.arange(teams), (np.arange(teams) + 1) % teams] = sent
        messages = np.roll((arriving > 0).sum(axis=0), -1)
        following = np.vstack([arriving[1:], np.zeros((1, teams), dtype=np.int64)])
        key_rows = (arriving + following).max(axis=0)
        step_rows = arriving.max(axis=0)
    else:
        forward += least
        messages = (least > 0).sum(axis=1)
        key_rows = step_rows = least.sum(axis=0)
    anchors = _anchor_rows(plan)
    return RowTraffic(
        forward=forward + anchors,
        returns=least.T + anchors.T,
        messages=messages + (anchors > 0).sum(axis=1),
        return_messages=(least.T > 0).sum(axis=1) + (anchors.T > 0).sum(axis=1),
        key_rows=key_rows,
        step_rows=step_rows,
    )


def layer_bytes(
    plan: BatchPlan,
    rows: RowTraffic,
    sizes: ModelSizes,
    element_size: int,
    forwards: int,
    backwards: int = 1,
    swaps: int | None = None,
) -> np.ndarray:
    """int64 (P, P): bytes that rank i sends to rank j for attention in a training step.

    Args:
        element_size: bytes of an element of queries, keys and values; gradients of keys are fp32,
            but those that ring-flash-attn's llama3 function reduces.
        forwards, backwards: passes a step in which keys travel, 2 and 1 of a layer with gradient
            checkpointing; of one layer or of all together.
        swaps: forwards in which ulysses swaps, where they are not ``forwards``.
    """
    heads, kv_heads = heads_per_rank(sizes.num_heads, sizes.num_kv_heads, plan.ulysses)
    row = 2 * kv_heads * sizes.head_dim
    gradient_size = 4
    if isinstance(plan, RingFlashAttnPlan):
        gradient_size = plan.gradient_size(element_size)
    keys = rows.forward * (row * element_size * (forwards + backwards))
    teams = keys + rows.returns * (row * gradient_size * backwards)
    sent = np.kron(teams, np.eye(plan.ulysses, dtype=np.int64))
    if plan.ulysses > 1:
        local = plan.batch_size * plan.local_length * (2 * heads + 2 * kv_heads) * sizes.head_dim
        member = 1 - np.eye(plan.ulysses, dtype=np.int64)
        swapped = np.kron(np.eye(plan.num_teams, dtype=np.int64), member)
        rounds = (forwards if swaps is None else swaps) + backwards
        sent += swapped * (local * element_size * rounds)
    return sent


def across_nodes(num_ranks: int, devices_per_node: int, first_rank: int = 0) -> np.ndarray:
    """bool (P, P): ranks i and j of an SP group that starts at ``first_rank`` are on two nodes."""
    node = (first_rank + np.arange(num_ranks)) // devices_per_node
    return node[:, None] != node[None, :]


def _unpruned_traffic(plan: RingFlashAttnPlan) -> RowTraffic:
    """Every rank's whole shard: round the ring, or to all others at once.

    The steps of :meth:`~anchorcontext.plan.RingFlashAttnPlan.rank`, in closed form.
    """
    ranks, num_rows = plan.sp_size, plan.batch_size * plan.local_length
    ones = np.ones(ranks, dtype=np.int64)
    if plan.exchange == "ring":
        to_next = np.roll(np.eye(ranks, dtype=np.int64), 1, axis=1)
        return RowTraffic(
            forward=to_next * num_rows * (ranks - 1),
            returns=to_next * num_rows * ranks,
            messages=ones * (ranks - 1),
            return_messages=ones * ranks,
            key_rows=ones * 2 * num_rows,
            step_rows=ones * num_rows,
        )
    to_others = (1 - np.eye(ranks, dtype=np.int64)) * num_rows
    return RowTraffic(
        forward=to_others,
        returns=to_others,
        messages=ones * (ranks - 1),
        return_messages=ones * (ranks - 1),
        key_rows=ones * num_rows * (ranks - 1),
        step_rows=ones * num_rows * (ranks - 1),
    )


def _by_owner(need: np.ndarray, size: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """int64 (T, T): rows that owner i has and rank j needs."""
    teams = len(need)
    user, piece = np.nonzero(need)
    place = owner[piece] * teams + user
    counts = np.bincount(place, weights=size[piece], minlength=teams * teams)
    return counts.astype(np.int64).reshape(teams, teams)


def _anchor_rows(plan: BatchPlan) -> np.ndarray:
    """int64 (T, T): anchors that i broadcasts to j."""
    pieces, teams = plan.pieces, plan.num_teams
    rows = np.zeros((teams, teams), dtype=np.int64)
    for index, window in enumerate(plan.windows):
        if not window.mode.anchor:
            continue
        mine = np.flatnonzero(pieces.window == index)
        sees = mine[pieces.group[mine] != pieces.group[mine[0]]]
        owner = pieces.owner[mine[0]]
        rows[owner, np.unique(pieces.owner[sees])] += 1
        rows[owner, owner] = 0
    return rows
