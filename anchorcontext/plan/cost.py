"""The cost model: modelled seconds of one training step of one layer, rank by rank.

A rank's time is::

    linear work + attention work + exposed travel
    exposed = travel - min(hideable * travel, attention work)
    travel  = rows * bytes_per_row / bytes_per_second + messages * seconds_per_message

``rows`` is the larger of the key rows a rank receives and sends in one forward (links are full
duplex), ``messages`` likewise the ranks it exchanges rows with. The step takes as long as its
slowest rank. The anchor's row costs the same under every layout and is left out.

Modelled, not measured: matrix products and attention each run at one rate; travel hides behind
attention alone, and never entirely (the copies of a collective occupy a part of the device).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .heads import heads_per_rank


@dataclass(frozen=True)
class CostModel:
    """What a layer costs on one device; the defaults are a layer of an 8B model on an H100.

    Hidden size 4096, intermediate size 14336, 32 query and 8 key/value heads of 128 dimensions,
    bf16 with fp32 gradients, no recomputation: :meth:`from_shapes` of these gives the defaults,
    and the heads. A run's own costs come from its model and ``parallel.hardware``
    (:mod:`anchorcontext.train.costs`).
    """

    flops_per_token: float = 1_308_622_848.0
    """Matrix products of one token, forward and backward."""
    flops_per_pair: float = 57_344.0
    """Attention of one visible (query, key) pair over all heads, forward and backward."""
    bytes_per_row: float = 16_384.0
    """Keys and values of one row forward, again in backward, and their gradients back."""
    gradient_bytes_per_row: float = 8_192.0
    """The part of them that goes back: gradients, from whoever used the row to its owner."""
    memory_per_row: float = 4_096.0
    """Keys and values of one row, as they lie in memory."""
    swap_bytes_per_head: float = 512.0
    """One head of one token that ulysses swaps: forward, and its gradient in backward."""
    messages_per_peer: float = 3.0
    """Messages to one rank in a step: forward, backward, gradients."""
    heads: tuple[int, int] | None = None
    """Query and key/value heads; ``exchange: auto`` considers ulysses only where it knows them."""
    exchange_memory: float = 4e9
    """Bytes of a device that the buffers of an exchange may take: 5 % of an H100's memory."""
    flops_per_second: float = 400e12
    """Of matrix products: 40 % of an H100's dense bf16 peak, what training reaches."""
    attention_flops_per_second: float | None = None
    """Of attention; None: as of matrix products."""
    seconds_per_tile: float = 0.0
    """What a tile costs beyond its pairs."""
    bytes_per_second: float = 50e9
    """Of one device's link, each way: 400 Gb/s InfiniBand. An H100's NVLink has 450e9."""
    seconds_per_message: float = 2e-6
    """What a message costs beyond its bytes, several being posted together."""
    hideable: float = 0.9
    """The share of travel that can hide behind attention."""

    @classmethod
    def from_shapes(
        cls,
        *,
        hidden_size: int,
        intermediate_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        forwards: int = 1,
        element_size: int = 2,
        gradient_size: int = 4,
        **rates: float,
    ) -> CostModel:
        """The costs of a decoder layer with a gated MLP; otherwise as :meth:`of_layer`."""
        attention = hidden_size * head_dim * (2 * num_heads + 2 * num_kv_heads)
        return cls.of_layer(
            linear_weights=attention + 3 * hidden_size * intermediate_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            forwards=forwards,
            element_size=element_size,
            gradient_size=gradient_size,
            **rates,
        )

    @classmethod
    def of_layer(
        cls,
        *,
        linear_weights: float,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        forwards: float = 1,
        attention_forwards: float | None = None,
        swaps: float | None = None,
        element_size: int = 2,
        gradient_size: int = 4,
        **rates: float,
    ) -> CostModel:
        """The costs of a decoder layer.

        A matrix product costs 2 FLOPs a weight and token forward and twice that backward;
        attention 4 D a pair and query head forward (two products) and 2.5 times that backward
        (five, one of them recomputed).

        Args:
            linear_weights: weights of the layer's matrix products.
            forwards: forward passes a step, 2 with gradient checkpointing; a mean, where layers
                differ.
            attention_forwards, swaps: of attention and its exchange, and those in which ulysses
                swaps, where they are not ``forwards``.
            element_size: bytes of an element of keys and values.
            gradient_size: bytes of an element of the key gradients that travel back.
            rates: fields of the device: FLOP/s, bytes/s, seconds, memory.
        """
        keys = 2 * num_kv_heads * head_dim
        attended = forwards if attention_forwards is None else attention_forwards
        swaps = attended if swaps is None else swaps
        return cls(
            flops_per_token=2.0 * linear_weights * (forwards + 2),
            flops_per_pair=4.0 * num_heads * head_dim * (attended + 2.5),
            bytes_per_row=float(keys * (element_size * (attended + 1) + gradient_size)),
            gradient_bytes_per_row=float(keys * gradient_size),
            memory_per_row=float(keys * element_size),
            swap_bytes_per_head=float(head_dim * element_size * (swaps + 1)),
            messages_per_peer=attended + 2.0,
            heads=(num_heads, num_kv_heads),
            **rates,
        )

    def share_of_heads(self, ulysses: int) -> CostModel:
        """The costs of a row and a pair for one rank of a team that swaps heads."""
        rows = 1 / ulysses
        if self.heads is not None:
            rows = heads_per_rank(*self.heads, ulysses)[1] / self.heads[1]
        return replace(
            self,
            flops_per_pair=self.flops_per_pair / ulysses,
            bytes_per_row=self.bytes_per_row * rows,
            gradient_bytes_per_row=self.gradient_bytes_per_row * rows,
            memory_per_row=self.memory_per_row * rows,
        )

    @property
    def seconds_per_token(self) -> float:
        """Linear work of one token."""
        return self.flops_per_token / self.flops_per_second

    @property
    def seconds_per_pair(self) -> float:
        """Attention work of one visible pair."""
        return self.flops_per_pair / (self.attention_flops_per_second or self.flops_per_second)

    def travel_seconds(self, rows: np.ndarray | float, peers: np.ndarray | float) -> np.ndarray:
        """Time on the link of ``rows`` key rows exchanged with ``peers`` ranks."""
        bytes_moved = np.asarray(rows) * self.bytes_per_row
        messages = np.asarray(peers) * self.messages_per_peer
        return bytes_moved / self.bytes_per_second + messages * self.seconds_per_message

    def rank_seconds(
        self, tokens: int, pairs: np.ndarray, rows: np.ndarray, peers: np.ndarray
    ) -> np.ndarray:
        """Modelled seconds of each rank, float64 (P,).

        Args:
            tokens: rows a rank holds, padding included.
            pairs, rows, peers: (P,) visible pairs computed; key rows exchanged; ranks exchanged
                with.
        """
        attention = np.asarray(pairs) * self.seconds_per_pair
        travel = self.travel_seconds(rows, peers)
        exposed = travel - np.minimum(self.hideable * travel, attention)
        return tokens * self.seconds_per_token + attention + exposed
