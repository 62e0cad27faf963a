"""One optimiser step: the loss and gradient scale, forward, backward, update.

The loss of a step is *one* mean: the summed cross-entropy of all ranks and micro-batches over the
number of valid targets among them. DeepSpeed divides gradients by the number of ranks, so each rank
backpropagates ``local_sum * world / targets`` and leaves DeepSpeed's division by the accumulation
steps out. Measured on DeepSpeed 0.19.8: the gradient equals that of a single process within 1e-6 on
ZeRO 0 to 3 for every (dp, sp). With DeepSpeed's own sequence-parallel groups it is 2x or 0.5x,
depending on the stage, which Adam hides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from anchorcontext.kernels.pinned import to_device

from ..config.sections import AttentionSection
from ..errors import UserError
from ..modes import PADDING
from ..parallel import Mesh, Plan, make_plan, shard
from ..plan import CostModel
from ..watch.metrics import StepMeter
from ..window import Window
from .control import Control
from .costs import plan_options
from .engine import apply_step, learning_rate

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

NO_TARGETS = "no valid targets"
NOT_FINITE = "gradient not finite"
LOSS_SPIKE, GRADIENT_SPIKE = "loss spike", "gradient spike"
SPIKES = (LOSS_SPIKE, GRADIENT_SPIKE)


@dataclass(frozen=True)
class StepLimits:
    """What a step must not exceed to be applied; None: no limit."""

    loss: float | None = None
    grad_norm: float | None = None


@dataclass(frozen=True)
class StepOutcome:
    """What a step did, the same on every rank."""

    num_targets: int
    """Valid targets of the global batch."""
    lr: float
    grad_norm: float | None
    """Norm of the whole gradient before clipping; None when there was none."""
    skip_reason: str | None
    """Why parameters, optimiser state and schedule are unchanged; None for an applied step."""


def plan_micro_batches(
    micro_batches: Sequence[Sequence[Window]],
    mesh: Mesh,
    attention: AttentionSection,
    control: Control,
    cost: CostModel | None = None,
) -> list[Plan]:
    """The plan of every micro-batch of a step; collective.

    ``cost``: of a layer of the model (:func:`~anchorcontext.train.costs.cost_model`).

    Raises:
        UserError: on every rank, when the ranks of some SP group were given different windows.
    """
    plans: list[Plan] = []
    error: UserError | None = None
    try:
        for windows in micro_batches:
            plans.append(
                make_plan(
                    windows,
                    mesh.sp_group,
                    **plan_options(attention, cost),
                    engine=attention.engine,
                )
            )
    except UserError as raised:  # alike in one SP group, but the others know nothing of it
        error = raised
    control.agree(error, "planning a step")
    return plans


def count_targets(micro_batches: Sequence[Sequence[Window]], mesh: Mesh, control: Control) -> int:
    """Valid targets of the global batch; each window counts once, not once a rank of its group."""
    mine = sum(window.num_targets for windows in micro_batches for window in windows)
    return control.sum([mine if mesh.sp_rank == 0 else 0])[0]


def train_step(
    engine: DeepSpeedEngine,
    plans: Sequence[Plan],
    num_targets: int,
    meter: StepMeter,
    limits: StepLimits = StepLimits(),
    control: Control | None = None,
) -> StepOutcome:
    """Run the micro-batches of one step and update the parameters; collective.

    A rank or a micro-batch without any valid target takes part in every collective with a gradient
    of exactly zero. A step without any does nothing.

    Args:
        engine: wraps ``TrainModel``.
        plans: this rank's micro-batches, as many on every rank.
        num_targets: valid targets of the global batch, from ``count_targets``.
        meter: receives this rank's losses, counts and times.
        limits: beyond which the update is held back; a limit of the loss costs waiting for the
            device, and needs ``control``.
    """
    lr = learning_rate(engine)
    if num_targets == 0:
        return StepOutcome(0, lr, None, NO_TARGETS)
    scale = engine.world_size / num_targets
    for index, plan in enumerate(plans):
        engine.set_gradient_accumulation_boundary(index == len(plans) - 1)
        run_micro_batch(engine, plan, scale, meter)
    over = _over_loss_limit(limits, meter, num_targets, control)
    with meter.timed("optimizer"):
        grad_norm, applied = apply_step(engine, -math.inf if over else limits.grad_norm)
    held_back = LOSS_SPIKE if over else GRADIENT_SPIKE
    reason = None if applied else held_back if math.isfinite(grad_norm) else NOT_FINITE
    return StepOutcome(num_targets, lr, grad_norm, reason)


def _over_loss_limit(
    limits: StepLimits, meter: StepMeter, num_targets: int, control: Control | None
) -> bool:
    if limits.loss is None:
        return False
    assert control is not None, "a limit of the loss needs the losses of all ranks"
    return sum(control.gather(meter.loss_sum)) / num_targets > limits.loss


def run_micro_batch(engine: DeepSpeedEngine, plan: Plan, scale: float, meter: StepMeter) -> None:
    """Forward and backward of one micro-batch; the gradient is ``scale`` times the loss's.

    Nothing here waits for the device, so that the next micro-batch is queued while it works; but
    where the engine rotates, the model reads the positions first.
    """
    plan.meter.measure_on(engine.device)
    with meter.timed("forward_backward"):
        local = shard(list(plan.windows), plan)
        input_ids, position_ids, labels = (
            to_device(x, engine.device) for x in (local.input_ids, local.position_ids, local.labels)
        )
        loss_sum, loss_tokens = engine(
            input_ids, position_ids=position_ids, labels=labels, plan=plan
        )
        assert loss_sum.dtype == torch.float32, f"the loss is summed in fp32, not {loss_sum.dtype}"
        engine.backward(loss_sum * scale, scale_wrt_gas=False)
    meter.add_micro_batch(
        loss_sum=loss_sum,
        loss_tokens=loss_tokens,
        tokens=int((local.doc_ids.numpy() != PADDING).sum()),
        attention_pairs=plan.num_pairs,
        attention=plan.meter,
    )
