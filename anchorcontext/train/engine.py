"""The DeepSpeed engine: its options, its parameter groups, and what differs between ZeRO stages.

DeepSpeed is given no model-parallel unit and no sequence-parallel size: it sees every rank as a
data-parallel one (dp = world) and averages gradients over all of them, which ``step.py`` undoes.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ..config.deepspeed import optimizer_device
from ..errors import UserError
from .schedule import learning_rate_factor

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from ..config import Config

logger = logging.getLogger(__name__)


def deepspeed_config(config: Config, world_size: int, device: torch.device) -> dict[str, Any]:
    """Our options for DeepSpeed, with the ``deepspeed`` section of the config merged in.

    Gradients of bf16 models are accumulated and reduced in fp32 unless that section says
    otherwise; the optimiser keeps fp32 master weights.

    Raises:
        UserError: ``world_size`` does not fit the config.
    """
    train, bf16 = config.train, config.model.dtype == "bf16"
    options: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": train.micro_batch_windows,
        "gradient_accumulation_steps": config.check_world(world_size).accumulation,
        "gradient_clipping": train.clip_norm or 0.0,
        "zero_optimization": {"stage": train.zero_stage},
        "zero_allow_untested_optimizer": True,
        "optimizer": _optimizer_options(config, device),
        # It would wait for the device before every micro-batch; the record has its numbers.
        "timers": {"throughput": {"enabled": False}},
    }
    if train.offload_optimizer != "none":
        offload = {"device": train.offload_optimizer, "pin_memory": device.type == "cuda"}
        options["zero_optimization"]["offload_optimizer"] = offload
    if bf16:
        # A gradient that is not finite is never applied, whatever the stage (fp32 does so anyway).
        options["bf16"] = {"enabled": True, "check_grad_overflow": True}
        options["communication_data_type"] = "fp32"
        if train.zero_stage > 0:
            options["data_types"] = {"grad_accum_dtype": "fp32"}
    return _merged(options, config.deepspeed_options())


def check_deepspeed_options(options: dict[str, Any]) -> None:
    """Let DeepSpeed read its options, before there is anything to train; needs a process group.

    Raises:
        UserError: DeepSpeed refuses an option or its value.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig(deepcopy(options))
    except (ValueError, TypeError, AssertionError) as error:
        reason = " ".join(str(error).split("For further information")[0].split())
        raise UserError(f"deepspeed: {reason}; mend the deepspeed section") from None


def build_engine(train_model: nn.Module, config: Config, device: torch.device) -> DeepSpeedEngine:
    """Wrap the model for training; collective, every rank calls it.

    Args:
        train_model: ``TrainModel`` (or a module with its signature), the same weights on all ranks.
        config: the resolved config.
        device: this rank's device.
    """
    import deepspeed
    import torch.distributed as dist

    if device.type == "cpu":
        without_compiled_operators()
    options = deepspeed_config(config, dist.get_world_size(), device)
    with quiet_deepspeed():
        check_deepspeed_options(options)
        engine, _, _, _ = deepspeed.initialize(
            model=train_model,
            model_parameters=parameter_groups(train_model, config.optimizer.weight_decay),
            lr_scheduler=_scheduler(config),
            config=options,
        )
    if config.model.dtype == "bf16" and config.train.zero_stage == 0:
        _mend_unsharded_bf16(engine)
    return engine


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices are decayed; vectors (norm weights, biases) are not.

    The paper says "weight decay 0.1" and not on what. This is the convention of LLaMA and of the
    transformers trainer.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if _dim(p) >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if _dim(p) < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _dim(parameter: nn.Parameter) -> int:
    # A parameter that is partitioned already is an empty vector.
    return len(getattr(parameter, "ds_shape", parameter.shape))


def apply_step(engine: DeepSpeedEngine, max_norm: float | None = None) -> tuple[float, bool]:
    """Clip, update the parameters and advance the schedule, once all gradients are accumulated.

    Args:
        max_norm: a gradient with a larger norm is held back; None applies every finite one.

    Returns:
        The norm of the whole gradient before clipping, and whether the step was applied: a gradient
        that is not finite, or held back, leaves parameters, optimiser state and schedule as they
        were.
    """
    if engine.optimizer is engine.basic_optimizer:
        # Plain fp32 without ZeRO: DeepSpeed computes a norm only to clip, and applies NaN.
        gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if not math.isfinite(norm) or (max_norm is not None and norm > max_norm):
            engine.zero_grad()
            return norm, False
        engine.step()
        return norm, True
    if max_norm is None:
        engine.step()
        return float(engine.get_global_grad_norm()), engine.was_step_applied()
    scheduler = engine.lr_scheduler
    groups = scheduler.optimizer.param_groups
    before, rates = scheduler.state_dict(), [group["lr"] for group in groups]
    with _held_back_above(engine, max_norm):
        engine.step()
    norm = float(engine.get_global_grad_norm())
    if not engine.was_step_applied() or norm <= max_norm:
        return norm, engine.was_step_applied()
    scheduler.load_state_dict(before)
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    return norm, False


@contextlib.contextmanager
def _held_back_above(engine: DeepSpeedEngine, max_norm: float) -> Iterator[None]:
    """Keep the optimiser from updating anything when the gradient's norm exceeds ``max_norm``.

    DeepSpeed knows the norm inside its own step only, before it calls the optimiser; torch's hooks
    run between the two. An optimiser passes over parameters without a gradient.
    """
    optimizer = engine.basic_optimizer
    kept: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def take(*_: Any) -> None:
        if float(engine.get_global_grad_norm()) > max_norm:
            for group in optimizer.param_groups:
                kept.extend((parameter, parameter.grad) for parameter in group["params"])
            for parameter, _gradient in kept:
                parameter.grad = None

    def give_back(*_: Any) -> None:
        for parameter, gradient in kept:
            parameter.grad = gradient
        kept.clear()

    hooks = (
        optimizer.register_step_pre_hook(take),
        optimizer.register_step_post_hook(give_back),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def learning_rate(engine: DeepSpeedEngine) -> float:
    """The learning rate of the next step."""
    return float(engine.get_lr()[0])


def _optimizer_options(config: Config, device: torch.device) -> dict[str, Any]:
    given = config.optimizer
    if given.type == "sgd":
        return {"type": "SGD", "params": {"lr": given.lr, "weight_decay": given.weight_decay}}
    params: dict[str, Any] = {
        "lr": given.lr,
        "betas": list(given.betas),
        "eps": given.eps,
        "weight_decay": given.weight_decay,
    }
    if device.type == "cpu":
        params["torch_adam"] = True
    elif optimizer_device(config) == "none":
        # torch's fused AdamW needs no compiler at run time, DeepSpeed's FusedAdam does.
        params |= {"torch_adam": True, "fused": True}
    return {"type": "AdamW", "params": params}


def _scheduler(config: Config) -> Callable[[torch.optim.Optimizer], LambdaLR]:
    schedule = config.schedule
    factor = learning_rate_factor(
        schedule.type,
        warmup_steps=schedule.warmup_steps,
        total_steps=config.train.steps,
        min_ratio=schedule.min_lr_ratio,
    )
    return lambda optimizer: LambdaLR(optimizer, factor)


def _mend_unsharded_bf16(engine: DeepSpeedEngine) -> None:
    """Make bf16 without ZeRO compute what the ZeRO stages compute.

    DeepSpeed has no fp32 accumulation there; autograd has. And it starts with an optimiser step on
    zero gradients: the masters are decayed once, and Adam takes the first real step for its second
    (0.73 of its size at the paper's betas).
    """
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            parameter.grad_dtype = torch.float32
    engine.basic_optimizer.state.clear()
    optimizer = engine.optimizer
    for masters, weights in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
        for master, weight in zip(masters, weights, strict=True):
            master.data.copy_(weight.data)


def without_compiled_operators() -> None:
    """Tell DeepSpeed that this machine has none of its C++ operators.

    On a CPU it would otherwise compile a shared-memory all-reduce that only inference uses: 70 s
    at the first start, a failure where there is no C++ compiler, and 3 s of probing at every start.
    """
    import deepspeed.ops

    if "__compatible_ops__" not in vars(deepspeed.ops):
        deepspeed.ops.__compatible_ops__ = defaultdict(bool)


@contextlib.contextmanager
def quiet_deepspeed() -> Iterator[None]:
    """DeepSpeed prints memory figures while it starts, and calls functions that torch renamed."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    for old in ("reduce_scatter_tensor", "all_gather_into_tensor"):
        message = rf"`torch\.distributed\.{old}` is deprecated"
        warnings.filterwarnings("ignore", message=message, category=FutureWarning)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        yield
    logger.debug("DeepSpeed said: %s", printed.getvalue())


def _merged(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """``theirs`` over ``ours``, section by section; contradictions were refused with the config."""
    merged = deepcopy(ours)
    for key, value in theirs.items():
        below = merged.get(key)
        both = isinstance(below, dict) and isinstance(value, dict)
        merged[key] = _merged(below, value) if both else deepcopy(value)  # type: ignore[arg-type]
    return merged
