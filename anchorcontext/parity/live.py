"""The distributed side: the real training path of a live engine, read and then undone.

Forward, loss, gradient scale, accumulation and reduction are those of a training step; only the
update is left out. Afterwards the engine is as it was between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ..parallel import Mesh, Plan, shard
from ..train.consolidate import strip_wrapper
from ..train.control import Control
from ..train.step import run_micro_batch
from ..watch.metrics import StepMeter
from ..window import Window
from .baseline import captured_hidden, head_weight, logits_of

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

# Logits that travel to rank 0 in one message.
MESSAGE_BYTES = 64 << 20


@dataclass(frozen=True)
class LiveRun:
    """What this rank keeps of a distributed pass over the micro-batches."""

    loss_sum: float
    """Summed cross-entropy over all ranks and micro-batches, nats."""
    hidden: list[torch.Tensor]
    """(B, S, D) a micro-batch: this rank's shard of what the head gets."""
    head: torch.Tensor
    """(V, D) fp32, this rank's own copy of the head's weight."""


@dataclass(frozen=True)
class WindowShard:
    """One window of the global batch and where its tokens are; known to every rank."""

    index: int
    """Number in the global batch."""
    window: Window
    micro_batch: int
    row: int
    """Which window of its micro-batch."""
    tokens: dict[int, np.ndarray]
    """Rank -> the window's real tokens that it holds, in the order of its rows."""


def run_live(
    engine: DeepSpeedEngine,
    plans: Sequence[Plan],
    control: Control,
    scale: float | None,
) -> LiveRun:
    """Run the micro-batches of one step without the update; collective.

    Args:
        engine: wraps ``TrainModel``; between two steps.
        plans: this rank's micro-batches.
        control: to add up the loss.
        scale: of the gradient, as in a training step; None runs forward only.
    """
    meter = StepMeter(engine.device)
    with captured_hidden(engine.module) as hidden:
        for index, plan in enumerate(plans):
            if scale is None:
                _forward(engine, plan, meter)
                continue
            engine.set_gradient_accumulation_boundary(index == len(plans) - 1)
            run_micro_batch(engine, plan, scale, meter)
    loss_sum = sum(control.gather(meter.finish().loss_sum))
    return LiveRun(loss_sum, hidden, head_weight(engine.module.causal_lm))


def _forward(engine: DeepSpeedEngine, plan: Plan, meter: StepMeter) -> None:
    local = shard(list(plan.windows), plan, engine.device)
    with torch.no_grad():
        # The module, not the engine: nothing that counts micro-steps hears of it.
        loss, targets = engine.module(local.input_ids, local.position_ids, local.labels, plan)
    meter.add_micro_batch(loss_sum=loss, loss_tokens=targets, tokens=0)


def locate_windows(
    micro_batches: Sequence[Sequence[Window]], plans: Sequence[Plan], mesh: Mesh, control: Control
) -> list[WindowShard]:
    """All windows of the global batch and which rank holds which of their tokens; collective.

    The windows are those that were to be computed, whatever the plans made of them.
    """
    mine = [
        (
            list(windows) if mesh.sp_rank == 0 else None,
            [_held(plan, row, window)[1] for row, window in enumerate(windows)],
        )
        for windows, plan in zip(micro_batches, plans, strict=True)
    ]
    everyone = control.gather(mine)
    located: list[WindowShard] = []
    for micro_batch in range(len(plans)):
        for first in range(0, mesh.world_size, mesh.sp):
            for row, window in enumerate(everyone[first][micro_batch][0]):
                ranks = range(first, first + mesh.sp)
                tokens = {rank: everyone[rank][micro_batch][1][row] for rank in ranks}
                held = np.sort(np.concatenate(list(tokens.values())))
                assert np.array_equal(held, np.arange(window.num_tokens)), "each token on one rank"
                located.append(WindowShard(len(located), window, micro_batch, row, tokens))
    return located


def _held(plan: Plan, row: int, window: Window) -> tuple[np.ndarray, np.ndarray]:
    """This rank's rows of a window that are no padding, and the tokens they are."""
    tokens = plan.data.local_indices(plan.sp_rank, row)
    rows = np.flatnonzero(tokens < window.num_tokens)
    return rows, tokens[rows]


def stream_logits(
    live: LiveRun,
    plans: Sequence[Plan],
    located: WindowShard,
    control: Control,
    consume: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    """Bring a window's logits to rank 0, one message at a time; every rank calls it.

    ``consume(tokens (n,), logits (n, V) fp32)`` is called on rank 0 until every token of the window
    was seen once.
    """
    vocab_size = live.head.shape[0]
    step = max(1, MESSAGE_BYTES // (4 * vocab_size))
    for source, tokens in located.tokens.items():
        if control.rank not in (0, source):
            continue
        if control.rank == source:
            held, _ = _held(plans[located.micro_batch], located.row, located.window)
            rows = torch.from_numpy(held)
            hidden = live.hidden[located.micro_batch][located.row]
        for start in range(0, len(tokens), step):
            places = torch.from_numpy(tokens[start : start + step])
            if control.rank == source:
                logits = logits_of(hidden, live.head, rows[start : start + step])
            else:
                logits = live.head.new_empty(len(places), vocab_size)
            if source == 0:
                consume(places, logits)
            elif control.rank == source:
                dist.send(logits, dst=0)
            else:
                dist.recv(logits, src=source)
                consume(places, logits)


def full_gradients(module: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Every trained parameter's Hugging Face name and whole reduced gradient; collective.

    One gradient is whole at a time. Read after the last backward of a step, before the update; None
    where the engine holds none.
    """
    from deepspeed.utils import safe_get_full_grad

    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield strip_wrapper(name), safe_get_full_grad(parameter)


def discard_gradients(engine: DeepSpeedEngine) -> None:
    """Forget the gradients of a step that is not applied, as DeepSpeed does after an overflow."""
    optimizer = engine.optimizer
    engine.zero_grad()
    optimizer.zero_grad()
    for name in ("averaged_gradients", "all_grad_tensors"):
        # In place: the parameters' fragments hold the same dictionary.
        getattr(optimizer, name, {}).clear()
    if hasattr(optimizer, "reset_cpu_buffers"):
        optimizer.reset_cpu_buffers()
    if engine.zero_optimization_stage() in (1, 2):
        from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

        optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
