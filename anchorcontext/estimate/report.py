"""The estimate of a configured run: memory, work, traffic and time for every mode and world."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data import View, configured_view
from ..hardware import Hardware
from ..modes import get_mode
from ..plan import BatchPlan, check_heads, plan_batch
from ..plan.heads import heads_divide
from ..train.costs import cost_model, passes_of, plan_options
from ..watch.flops import attention_flops, linear_flops
from ..watch.sizes import ModelSizes
from ..window import Window
from ..words import counted
from .memory import (
    MemoryEstimate,
    StateMemory,
    activation_memory,
    estimate_memory,
    state_memory,
)
from .time import (
    MicroBatch,
    StateTraffic,
    optimizer_seconds,
    plan_micro_batch,
    state_traffic,
)
from .windows import sample_windows
from .worlds import dividing_sp, no_sp, ulysses_on

if TYPE_CHECKING:
    from ..config import Config

MODES = ("full", "intra_doc", "anchor")
SAMPLES = 4
"""Micro-batches drawn from the mix."""

KINDS = {
    "parameters": "exact: the model is built without memory",
    "states": "exact up to padding: what DeepSpeed 0.19 was counted to hold",
    "activations": "exact for decoder layers with a gated MLP in the tensors that autograd keeps; "
    "what backward works with on top is modelled",
    "exchange buffers": "exact row counts of the plan, modelled number of copies",
    "flops": "exact for the sampled windows",
    "attention bytes": "exact for the sampled windows: the plan that training executes",
    "gradient and weight bytes": "modelled: ring collectives",
    "seconds": "modelled from the hardware profile, nothing is measured",
}


@dataclass(frozen=True)
class ModeEstimate:
    """One mode on one world size. Bytes and seconds are of one training step."""

    mode: str
    view: str
    """The mode with what the config varies of it."""
    layout: str
    exchange: str
    choice: str | None
    """Why ``exchange: auto`` chose it for the first sampled micro-batch."""
    pairs_a_window: float
    density: float
    """Visible pairs over those of full causal attention."""
    linear_flops: float
    """Of the whole step over all ranks; what is recomputed is not counted."""
    attention_flops: float
    recomputed_flops: float
    balance: float
    """Attention work of the busiest rank over the mean."""
    sent_inside: float
    """Attention bytes to ranks of the same node: the rank that sends most, mean of the sample."""
    sent_across: float
    """Attention bytes to ranks of other nodes: the rank that sends most, mean of the sample."""
    sent_mean: float
    """Attention bytes sent, mean of the ranks."""
    sent_first: list[int]
    """Of each rank of one SP group for the first sampled micro-batch; exact."""
    linear_seconds: float
    attention_seconds: float
    exchange_seconds: float
    """Exposed travel of keys, values and their gradients."""
    state_seconds: float
    """Exposed travel of gradients and weights."""
    optimizer_seconds: float
    step_seconds: float
    tokens_per_second: float
    mfu: float
    """Model FLOPs over what all devices could do at their peak."""
    memory: MemoryEstimate


@dataclass(frozen=True)
class WorldEstimate:
    """One world size."""

    world_size: int
    dp: int
    sp: int
    accumulation: int
    note: str | None
    """What was changed of the config to fit this many ranks."""
    state_traffic: StateTraffic
    modes: list[ModeEstimate]


@dataclass(frozen=True)
class PlanEstimate:
    """What ``anchorcontext plan`` found."""

    model: ModelSizes
    hardware: Hardware
    mix: str
    window_tokens: int
    tokens_a_window: float
    """Mean of the sample; a prepared window may be shorter than window_tokens."""
    windows_per_step: int
    documents_a_window: float
    worlds: list[WorldEstimate]

    def as_dict(self) -> dict[str, Any]:
        """As JSON values; derived figures and the kind of every term included."""
        found = asdict(self)
        for world, part in zip(self.worlds, found["worlds"], strict=True):
            for mode, row in zip(world.modes, part["modes"], strict=True):
                row["memory"] |= {"peak": mode.memory.peak, "fits": mode.memory.fits}
        return found | {"kinds": dict(KINDS)}


def estimate_plan(
    config: Config,
    sizes: ModelSizes,
    hardware: Hardware,
    world_sizes: Sequence[int],
    mix: str,
    samples: int = SAMPLES,
) -> PlanEstimate:
    """Estimate the configured run on each of ``world_sizes``.

    Raises:
        UserError: a world size that cannot be planned; an unknown mix.
    """
    micro = config.train.micro_batch_windows
    windows = sample_windows(config, mix, samples * micro)
    batches = [windows[start : start + micro] for start in range(0, len(windows), micro)]
    documents = [len(np.unique(w.segment_docs)) - config.data.shared_anchor for w in windows]
    return PlanEstimate(
        model=sizes,
        hardware=hardware,
        mix=mix,
        window_tokens=config.data.window_tokens,
        tokens_a_window=float(np.mean([window.num_tokens for window in windows])),
        windows_per_step=config.train.windows_per_step,
        documents_a_window=float(np.mean(documents)),
        worlds=[_world(config, sizes, hardware, world, batches) for world in world_sizes],
    )


def fit_world(config: Config, sizes: ModelSizes, world_size: int) -> tuple[Config, str | None]:
    """The config on ``world_size`` ranks, and what was changed: parallel.sp, where it must be.

    The recipe (windows a step) stays; sp becomes the nearest value at which they divide.

    Raises:
        UserError: there is none, or the world is larger than 1024.
    """
    asked, attention = config.parallel.sp, config.attention
    fitting = [
        sp
        for sp in dividing_sp(config, world_size)
        if heads_divide(
            sizes.num_heads,
            sizes.num_kv_heads,
            sp if attention.exchange == "ulysses" else ulysses_on(config, sp),
        )
    ]
    if not fitting:
        raise no_sp(config, world_size, " and the model's heads")
    sp = min(fitting, key=lambda value: (abs(math.log(value / asked)), value))
    if sp == asked:
        return config, None
    changed = config.model_copy(
        update={
            "parallel": config.parallel.model_copy(update={"sp": sp}),
            "attention": attention.model_copy(update={"ulysses": ulysses_on(config, sp)}),
        }
    )
    step = f"{counted(config.train.windows_per_step, 'window')} a step"
    return changed, f"parallel.sp = {sp} instead of {asked}: {step} must divide"


def _world(
    config: Config,
    sizes: ModelSizes,
    hardware: Hardware,
    world_size: int,
    batches: list[list[Window]],
) -> WorldEstimate:
    config, note = fit_world(config, sizes, world_size)
    shape = config.check_world(world_size)
    traffic = state_traffic(sizes, config, hardware, world_size, shape.accumulation)
    modes = dict.fromkeys((*MODES, config.attention.mode))
    if config.attention.backend != "native":  # made for one mode, and for some not at all
        modes = dict.fromkeys([config.attention.mode])
    anchored = config.data.shared_anchor
    return WorldEstimate(
        world_size=world_size,
        dp=shape.dp,
        sp=shape.sp,
        accumulation=shape.accumulation,
        note=note,
        state_traffic=traffic,
        modes=[
            _mode(mode, config, sizes, hardware, world_size, batches, traffic)
            for mode in modes
            if anchored or mode != "anchor"
        ],
    )


def _mode(
    mode: str,
    config: Config,
    sizes: ModelSizes,
    hardware: Hardware,
    world_size: int,
    batches: list[list[Window]],
    traffic: StateTraffic,
) -> ModeEstimate:
    shape, cost = config.check_world(world_size), cost_model(config, sizes, hardware)
    options = plan_options(config.attention, cost)
    view = configured_view(config) if mode == config.attention.mode else View(get_mode(mode))
    plans = [plan_batch(list(map(view.apply, batch)), shape.sp, **options) for batch in batches]
    check_heads(sizes.num_heads, sizes.num_kv_heads, plans[0].ulysses)
    found = [plan_micro_batch(plan, sizes, config, hardware, shape.dp) for plan in plans]
    states = state_memory(sizes, config, world_size, lazy=hardware.kind == "cpu")
    work = _Seconds.of(found, shape.accumulation)
    hidden = min(cost.hideable * traffic.seconds, work.compute) if traffic.overlaps else 0.0
    optimizer = optimizer_seconds(states, hardware)
    step = work.total + traffic.seconds - hidden + optimizer
    lengths = np.array([window.num_tokens for batch in batches for window in batch], dtype=float)
    tokens = round(float(lengths.mean()) * config.train.windows_per_step)
    pairs = float(np.mean([batch.pairs.sum() for batch in found])) / len(batches[0])
    linear = linear_flops(sizes.flops_shape, tokens)
    attended = attention_flops(sizes.flops_shape, pairs * config.train.windows_per_step)
    peak = hardware.peak(config.model.dtype)
    sent = [batch.sent_inside + batch.sent_across for batch in found]
    return ModeEstimate(
        mode=mode,
        view=str(view),
        layout=plans[0].layout,
        exchange=plans[0].exchange_name,
        choice=None if plans[0].choice is None else plans[0].choice.reason,
        pairs_a_window=pairs,
        density=pairs / float((lengths * (lengths + 1) / 2).mean()),
        linear_flops=linear,
        attention_flops=attended,
        recomputed_flops=_recomputed(config, sizes, linear, attended),
        balance=float(np.mean([batch.balance for batch in found])),
        sent_inside=_mean([b.sent_inside.max() for b in found], shape.accumulation),
        sent_across=_mean([b.sent_across.max() for b in found], shape.accumulation),
        sent_mean=_mean([part.mean() for part in sent], shape.accumulation),
        sent_first=sent[0].tolist(),
        linear_seconds=work.linear,
        attention_seconds=work.attention,
        exchange_seconds=work.exchange,
        state_seconds=traffic.seconds - hidden,
        optimizer_seconds=optimizer,
        step_seconds=step,
        tokens_per_second=tokens / step,
        mfu=(linear + attended) / step / (peak * world_size),
        memory=max(
            (
                _memory(states, config, sizes, hardware, shape.accumulation, plan, batch)
                for plan, batch in zip(plans, found, strict=True)
            ),
            key=lambda estimate: estimate.peak,
        ),
    )


def micro_batch_memory(
    config: Config, sizes: ModelSizes, hardware: Hardware, world_size: int, windows: list[Window]
) -> MemoryEstimate:
    """Memory of the busiest rank of the configured run when a micro-batch is ``windows``.

    Raises:
        UserError: the config does not fit the world, or its heads the exchange.
    """
    shape, cost = config.check_world(world_size), cost_model(config, sizes, hardware)
    batch = list(map(configured_view(config).apply, windows))
    plan = plan_batch(batch, shape.sp, **plan_options(config.attention, cost))
    check_heads(sizes.num_heads, sizes.num_kv_heads, plan.ulysses)
    found = plan_micro_batch(plan, sizes, config, hardware, shape.dp)
    states = state_memory(sizes, config, world_size, lazy=hardware.kind == "cpu")
    return _memory(states, config, sizes, hardware, shape.accumulation, plan, found)


def _memory(
    states: StateMemory,
    config: Config,
    sizes: ModelSizes,
    hardware: Hardware,
    accumulation: int,
    plan: BatchPlan,
    batch: MicroBatch,
) -> MemoryEstimate:
    """Of the rank of a micro-batch that holds most."""
    work = activation_memory(
        sizes,
        config,
        tokens=batch.tokens,
        key_rows=int(batch.rows.key_rows.max()),
        step_rows=int(batch.rows.step_rows.max()),
        received_rows=int(batch.rows.forward.sum(axis=0).max()),
        sp_size=plan.sp_size,
        ulysses=plan.ulysses,
        on_cpu=hardware.kind == "cpu",
    )
    return estimate_memory(states, work, accumulation, hardware.memory_bytes)


@dataclass(frozen=True)
class _Seconds:
    """A step's micro-batches, each at its slowest rank; the mean of the sample."""

    linear: float
    attention: float
    exchange: float

    @classmethod
    def of(cls, sample: list[MicroBatch], accumulation: int) -> _Seconds:
        return cls(
            linear=_mean([b.linear_seconds for b in sample], accumulation),
            attention=_mean([b.attention_seconds[b.slowest] for b in sample], accumulation),
            exchange=_mean([b.exposed_seconds[b.slowest] for b in sample], accumulation),
        )

    @property
    def compute(self) -> float:
        return self.linear + self.attention

    @property
    def total(self) -> float:
        return self.compute + self.exchange


def _recomputed(config: Config, sizes: ModelSizes, linear: float, attended: float) -> float:
    """FLOPs of every forward but the first: 2 of a weight's 6, 4 of a pair's 14."""
    passes = passes_of(config, sizes)
    weights = linear * (1 - sizes.head_weights / sizes.linear_weights) / 3
    again = weights * (passes.linear - passes.layers) + (attended * 4 / 14) * (
        passes.attention - passes.layers
    )
    return again / passes.layers


def _mean(values: Sequence[Any], accumulation: int) -> float:
    return float(np.mean(values)) * accumulation
