"""What a layer of the configured model costs on the configured hardware.

``train``, ``parity``, ``plan`` and ``inspect`` call the planner with the same options, made here
from the same config: pure arithmetic, equal on every rank without communication.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..hardware import Hardware, load_hardware
from ..plan import CostModel

if TYPE_CHECKING:
    from ..config import Config
    from ..config.sections import AttentionSection
    from ..parallel import Plan
    from ..watch.sizes import ModelSizes

GRADIENT_SIZE = 4
EXCHANGE_SHARE = 0.05
"""Of a device's memory, for the buffers of an exchange, where the config gives no bytes."""


def cost_model(config: Config, sizes: ModelSizes, hardware: Hardware | None = None) -> CostModel:
    """The costs of one layer of a model of ``sizes``.

    Rows travel at the rate of the node's links where every SP group lies in one node of the
    hardware (ranks are on nodes in their order), else at that of the network.

    Args:
        hardware: default: what ``parallel.hardware`` names.

    Raises:
        UserError: there is no such hardware profile, or it holds a wrong figure.
    """
    if hardware is None:
        hardware = load_hardware(config.parallel.hardware)
    parallel, dtype = config.parallel, config.model.dtype
    precision = config.attention.precision
    in_fp32 = precision.attends_in_fp32 or precision.engine_rotates
    attends_in = "fp32" if in_fp32 else dtype
    inside = hardware.devices_per_node % parallel.sp == 0
    rate = hardware.node_bytes_per_second if inside else hardware.network_bytes_per_second
    memory, passes = parallel.exchange_memory, passes_of(config, sizes)
    return CostModel.of_layer(
        linear_weights=(sizes.linear_weights - sizes.head_weights) / sizes.num_layers,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        forwards=passes.linear / sizes.num_layers,
        attention_forwards=passes.attention / sizes.num_layers,
        swaps=passes.swaps / sizes.num_layers,
        element_size=attention_element_size(config),
        gradient_size=GRADIENT_SIZE,
        flops_per_second=hardware.flops(dtype),
        attention_flops_per_second=hardware.attention_flops(attends_in),
        seconds_per_tile=hardware.seconds_per_tile,
        bytes_per_second=rate,
        seconds_per_message=hardware.seconds_per_message,
        exchange_memory=EXCHANGE_SHARE * hardware.memory_bytes if memory is None else memory,
    )


def plan_options(attention: AttentionSection, cost: CostModel | None) -> dict[str, Any]:
    """How ``plan_batch`` (:mod:`anchorcontext.plan`) and ``make_plan`` are called for a config."""
    return {
        "layout": attention.layout,
        "exchange": attention.exchange,
        "ulysses": attention.ulysses,
        "cost": cost,
        "exact": attention.exact,
        "backend": attention.backend,
    }


@dataclass(frozen=True)
class Passes:
    """Forward passes of a training step and micro-batch, summed over the layers."""

    layers: int
    """As many passes without any recomputation; backward is as many."""
    linear: float
    """Matrix products of weights, in units of a layer's."""
    attention: int
    """In which attention is computed and its keys travel."""
    swaps: int
    """In which ulysses swaps tokens for heads."""


def passes_of(config: Config, sizes: ModelSizes) -> Passes:
    """The forward passes of a step: the first ones, and what is recomputed in backward.

    A checkpointed layer runs twice; its attention once, where that is kept. A chunked MLP is
    computed once more than its layer, chunk by chunk.
    """
    layers, again = sizes.num_layers, checkpointed_layers(config, sizes.num_layers)
    chunked = layers * sizes.mlp_share if config.model.mlp_chunk_tokens is not None else 0.0
    attended = layers if config.model.keep_attention else layers + again
    return Passes(layers, layers + again + chunked, attended, layers + again)


def checkpointed_layers(config: Config, num_layers: int) -> int:
    """Layers that are recomputed in backward: numbers 0, n, 2n, ... of ``checkpoint_every`` n."""
    model = config.model
    return -(-num_layers // model.checkpoint_every) if model.gradient_checkpointing else 0


def predicted_bytes(plan: Plan, config: Config, sizes: ModelSizes) -> int:
    """Bytes this rank sends in attention when a training step runs ``plan``; what it then counts
    (``plan.meter``) is equal to it."""
    passes = passes_of(config, sizes)
    return plan.data.bytes_sent(
        plan.sp_rank,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        element_size=attention_element_size(config),
        gradient_size=GRADIENT_SIZE,
        forwards=passes.attention,
        backwards=passes.layers,
        swaps=passes.swaps,
    )


def attention_element_size(config: Config) -> int:
    """Bytes of an element of queries, keys and values, in attention and on the way there."""
    if config.attention.precision.attends_in_fp32:
        return 4
    return 2 if config.model.dtype == "bf16" else 4
