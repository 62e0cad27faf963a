"""Modelled seconds of a training step, and the bytes of gradients and weights by ZeRO stage.

A micro-batch takes as long as its slowest rank, whose time is the cost model's
(:mod:`anchorcontext.plan.cost`)::

    linear work + attention work + exposed travel
    exposed = travel - min(hideable * travel, attention work)
    travel  = max(bytes in the node / its rate, bytes across nodes / theirs) + messages * latency

Bytes and messages are the plan's own, counted for every pair of ranks; a link carries both
directions at once, so the larger of sent and received counts.

A step adds the traffic of gradients and weights over all W ranks (a ring collective of n bytes
makes every rank send ``(W - 1) / W * n``; an all-reduce twice that) and the optimiser's passes over
memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..hardware import Hardware
from ..plan import BatchPlan
from ..plan.tiling import tile_counts
from ..plan.traffic import piece_loads
from ..train.costs import attention_element_size, cost_model, passes_of
from ..watch.sizes import ModelSizes
from .links import RowTraffic, across_nodes, layer_bytes, row_traffic
from .memory import FP32, REDUCE_BUCKET, StateMemory, zero_options

if TYPE_CHECKING:
    from ..config import Config


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch over an SP group in one training step; arrays are (P,), a rank each."""

    tokens: int
    """Rows of a rank, padding included."""
    pairs: np.ndarray
    """Visible (query, key) pairs of all heads that a rank's work amounts to."""
    sent_inside: np.ndarray
    """Bytes sent for attention to ranks of the same node, all layers."""
    sent_across: np.ndarray
    """Bytes sent for attention to ranks of other nodes, all layers."""
    rows: RowTraffic
    linear_seconds: float
    attention_seconds: np.ndarray
    travel_seconds: np.ndarray
    exposed_seconds: np.ndarray

    @property
    def rank_seconds(self) -> np.ndarray:
        """(P,) seconds of each rank."""
        return self.linear_seconds + self.attention_seconds + self.exposed_seconds

    @property
    def slowest(self) -> int:
        """The rank that the others wait for."""
        return int(self.rank_seconds.argmax())

    @property
    def balance(self) -> float:
        """The busiest rank's pairs over the mean."""
        return float(self.pairs.max() / self.pairs.mean())


@dataclass(frozen=True)
class StateTraffic:
    """Gradients and weights of one step; bytes that every rank sends."""

    gradient_bytes: int
    """Reduced over all ranks."""
    weight_bytes: int
    """Gathered from all ranks."""
    inside: int
    across: int
    seconds: float
    """On the links."""
    overlaps: bool
    """ZeRO-3 hides it behind compute."""


def plan_micro_batch(
    plan: BatchPlan, sizes: ModelSizes, config: Config, hardware: Hardware, dp: int
) -> MicroBatch:
    """What one micro-batch costs every rank of its SP group."""
    cost, passes = cost_model(config, sizes, hardware), passes_of(config, sizes)
    element = attention_element_size(config)
    rows = row_traffic(plan)
    sent = layer_bytes(
        plan, rows, sizes, element, passes.attention, backwards=passes.layers, swaps=passes.swaps
    )
    across = _worst_place(sent, hardware.devices_per_node, dp)
    inside = np.where(across, 0, sent)
    outside = np.where(across, sent, 0)
    tokens = plan.batch_size * plan.local_length
    pairs = np.repeat(_team_pairs(plan), plan.ulysses) / plan.ulysses
    messages = rows.messages * (passes.attention + passes.layers)
    messages = np.repeat(messages + rows.return_messages * passes.layers, plan.ulysses)
    messages = messages + 2 * (plan.ulysses - 1) * (passes.swaps + passes.layers)
    tiles = np.repeat(tile_counts(plan.pieces, plan.num_teams, plan.exchange), plan.ulysses)
    attention = pairs * cost.seconds_per_pair + tiles * cost.seconds_per_tile
    attention = attention * sizes.num_layers
    travel = np.maximum(
        _busier(inside) / hardware.node_bytes_per_second,
        _busier(outside) / hardware.network_bytes_per_second,
    )
    travel = travel + messages * cost.seconds_per_message
    head = 6.0 * sizes.head_weights * tokens / cost.flops_per_second
    return MicroBatch(
        tokens=tokens,
        pairs=pairs,
        sent_inside=inside.sum(axis=1),
        sent_across=outside.sum(axis=1),
        rows=rows,
        linear_seconds=tokens * cost.seconds_per_token * sizes.num_layers + head,
        attention_seconds=attention,
        travel_seconds=travel,
        exposed_seconds=travel - np.minimum(cost.hideable * travel, attention),
    )


def state_traffic(
    sizes: ModelSizes, config: Config, hardware: Hardware, world_size: int, accumulation: int
) -> StateTraffic:
    """Gradients and weights of one step by ZeRO stage, in closed form.

    N parameters, A micro-batches, w bytes of a weight, gradients in fp32 (c = 4)::

        stage  gradients                          weights
        0      all-reduce  c N, once              -
        1      all-reduce  c N, once              all-gather w N, once
        2      all-reduce  c N, A times           all-gather w N, once
        3      reduce-scatter c N, A times        all-gather w N, 2 A times

    DeepSpeed's default for stages 1 and 2 (``use_multi_rank_bucket_allreduce``) is an all-reduce.
    """
    stage, n = config.train.zero_stage, sizes.parameters
    zero = zero_options(config)
    size = 2 if config.model.dtype == "bf16" else FP32
    share = (world_size - 1) / world_size
    wire = {"fp32": FP32, "bf16": 2, "fp16": 2}[_communication(config)]
    gradients = share * wire * n * (1 if stage == 3 else 2) * (accumulation if stage > 1 else 1)
    weights = share * size * n * (0, 1, 1, 2 * accumulation)[stage]
    nodes = -(-world_size // hardware.devices_per_node)
    rate, crossing = hardware.node_bytes_per_second, 0.0
    if nodes > 1:
        # A ring visits node after node, one hop in devices_per_node crosses; rings are many, and
        # each crosses at another device, so all of a node's network links work.
        crossing = nodes / world_size
        rate = min(rate, hardware.devices_per_node * hardware.network_bytes_per_second)
    buckets = -(-n // int(zero.get("reduce_bucket_size", REDUCE_BUCKET)))
    rounds = (
        3 * sizes.num_layers * accumulation
        if stage == 3
        else buckets * (accumulation if stage == 2 else 1) + 1
    )
    latency = rounds * math.ceil(math.log2(world_size)) * hardware.seconds_per_message
    total = gradients + weights
    return StateTraffic(
        gradient_bytes=round(gradients),
        weight_bytes=round(weights),
        inside=round(total * (1 - crossing)),
        across=round(total * crossing),
        seconds=total / rate + latency if world_size > 1 else 0.0,
        overlaps=bool(zero.get("overlap_comm", stage == 3)),
    )


def optimizer_seconds(states: StateMemory, hardware: Hardware) -> float:
    """Masters and moments are read and written once, gradients read, weights written."""
    moved = 2 * (states.masters + states.moments) + states.masters + states.weights
    return moved / hardware.memory_bytes_per_second


def _team_pairs(plan: BatchPlan) -> np.ndarray:
    """(T,) visible pairs of each team, the anchor's included."""
    pieces = plan.pieces
    pairs = np.asarray(piece_loads(pieces, plan.num_teams)[0], dtype=np.float64).copy()
    anchored = np.array([window.mode.anchor for window in plan.windows])
    first = np.flatnonzero(np.r_[True, pieces.window[1:] != pieces.window[:-1]])
    sees = anchored[pieces.window] & (pieces.group != pieces.group[first][pieces.window])
    return pairs + np.bincount(
        pieces.owner[sees], weights=pieces.size[sees], minlength=plan.num_teams
    )


def _worst_place(sent: np.ndarray, devices_per_node: int, dp: int) -> np.ndarray:
    """Which pairs are on two nodes, for the SP group whose ranks lie worst."""
    size = len(sent)
    places = {group * size % devices_per_node for group in range(min(dp, devices_per_node))}
    masks = [across_nodes(size, devices_per_node, place) for place in sorted(places)]
    return max(masks, key=lambda mask: int(sent[mask].sum()))


def _busier(sent: np.ndarray) -> np.ndarray:
    """(P,) the larger of what a rank sends and receives."""
    return np.maximum(sent.sum(axis=1), sent.sum(axis=0))


def _communication(config: Config) -> str:
    asked = config.deepspeed_options().get("communication_data_type") or "fp32"
    return {"bfp16": "bf16"}.get(str(asked), str(asked))
