"""``anchorcontext plan``: memory, traffic and time of a run, before any device is held."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from anchorcontext.cli.common import Outcome, config_command, echo, echo_table
from anchorcontext.config import Config
from anchorcontext.errors import UserError
from anchorcontext.words import counted

if TYPE_CHECKING:
    from anchorcontext.estimate.report import ModeEstimate, PlanEstimate, WorldEstimate

GIB = 2**30
GB = 1e9
MIXES = ("slimpajama", "upsampled", "stdlib", "prepared")
"""Those of ``estimate.windows``, whose import takes torch's."""


@config_command
@click.option(
    "--world", "worlds", metavar="N[,N...]", help="Ranks, up to 1024; default parallel.sp."
)
@click.option(
    "--mix",
    type=click.Choice(MIXES),
    help="Document lengths; prepared: the config's own windows, the default where they lie ready.",
)
@click.option(
    "--hardware",
    "device",
    metavar="NAME|FILE",
    help="Instead of parallel.hardware: a profile (a100-80g, h100, h200, b200, cpu) or a YAML file "
    "like theirs.",
)
def command(config: Config, worlds: str | None, mix: str | None, device: str | None) -> Outcome:
    """Predict memory, traffic, balance and step time of a run before any GPU is held.

    Only the model's config is read. Bytes sent in attention are those of the plans that training
    will execute; times come from the hardware profile and are a model. docs/planning.md says what
    each term is.
    """
    from anchorcontext.estimate.worlds import dividing_sp
    from anchorcontext.hardware import load_hardware

    world_sizes = _world_sizes(worlds) if worlds is not None else [config.parallel.sp]
    for world_size in world_sizes:
        dividing_sp(config, world_size)  # refuses before the model is read
    hardware = load_hardware(device or config.parallel.hardware)

    from anchorcontext.estimate.report import estimate_plan
    from anchorcontext.estimate.shape import configured_sizes
    from anchorcontext.estimate.windows import default_mix

    estimate = estimate_plan(
        config, configured_sizes(config), hardware, world_sizes, mix or default_mix(config)
    )
    _show(estimate)
    return Outcome(estimate.as_dict())


def _world_sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise UserError(f"--world {text!r}: give numbers of ranks, as in 8,64")
    return [int(part) for part in parts]


def _show(estimate: PlanEstimate) -> None:
    model, hardware = estimate.model, estimate.hardware
    echo(
        f"{model.model_type}, {model.parameters:,} parameters, "
        f"{counted(model.num_layers, 'layer')}; {counted(estimate.windows_per_step, 'window')} of "
        f"{estimate.window_tokens:,} tokens a step, mix {estimate.mix}: "
        f"{counted(round(estimate.documents_a_window), 'document')} a window"
    )
    echo(
        f"{hardware.name}: {hardware.memory_bytes / GB:,.0f} GB, {hardware.devices_per_node} a "
        f"node, {hardware.compute_fraction:.0%} of peak FLOP/s assumed"
    )
    for world in estimate.worlds:
        _show_world(world, hardware.memory_bytes)
    from anchorcontext.estimate.report import KINDS

    echo_table(list(KINDS.items()), title="What these figures are")


def _show_world(world: WorldEstimate, device_bytes: float) -> None:
    echo(
        f"\n{counted(world.world_size, 'rank')} = dp {world.dp} x sp {world.sp}, "
        f"{counted(world.accumulation, 'micro-batch', 'micro-batches')} a step"
        + (f" ({world.note})" if world.note else "")
    )
    modes = world.modes
    names = [mode.mode for mode in modes]
    rows: list[tuple[str, list[str]]] = [
        ("layout, exchange", [f"{m.layout}, {m.exchange}" for m in modes]),
        ("visible pairs of full attention", [f"{m.density:.2%}" for m in modes]),
        ("linear PFLOP a step", [f"{m.linear_flops / 1e15:,.4g}" for m in modes]),
        ("attention PFLOP a step", [f"{m.attention_flops / 1e15:,.4g}" for m in modes]),
        ("recomputed PFLOP a step", [f"{m.recomputed_flops / 1e15:,.4g}" for m in modes]),
        ("busiest rank / mean of attention", [f"{m.balance:.3f}" for m in modes]),
        ("attention GB sent in the node", [f"{m.sent_inside / GB:,.4g}" for m in modes]),
        ("attention GB sent across nodes", [f"{m.sent_across / GB:,.4g}" for m in modes]),
        ("seconds, linear", [f"{m.linear_seconds:,.4g}" for m in modes]),
        ("seconds, attention", [f"{m.attention_seconds:,.4g}" for m in modes]),
        ("seconds, exposed exchange", [f"{m.exchange_seconds:,.4g}" for m in modes]),
        ("seconds, exposed gradients, weights", [f"{m.state_seconds:,.4g}" for m in modes]),
        ("seconds, optimizer", [f"{m.optimizer_seconds:,.4g}" for m in modes]),
        ("seconds a step", [f"{m.step_seconds:,.4g}" for m in modes]),
        ("tokens/s", [f"{m.tokens_per_second:,.0f}" for m in modes]),
        ("model FLOPs utilisation", [f"{m.mfu:.1%}" for m in modes]),
    ]
    echo_table([(what, *values) for what, values in rows], ("busiest rank", *names))
    for mode in modes:
        if mode.view != mode.mode:
            echo(f"{mode.mode}, as the config varies it: {mode.view}")
        if mode.choice is not None:
            echo(f"{mode.mode}, exchange auto, a layer's step: {mode.choice}")
    traffic = world.state_traffic
    echo(
        f"every rank sends {traffic.gradient_bytes / GB:,.4g} GB of gradients and "
        f"{traffic.weight_bytes / GB:,.4g} GB of weights a step, {traffic.across / GB:,.4g} GB of "
        "it across nodes"
    )
    _show_memory(modes, device_bytes)


def _show_memory(modes: list[ModeEstimate], device_bytes: float) -> None:
    states = modes[0].memory.states
    terms = [
        ("weights", [states.weights] * len(modes)),
        ("weights gathered (ZeRO-3)", [states.gathered] * len(modes)),
        ("fp32 masters", [states.masters] * len(modes)),
        ("Adam's moments", [states.moments] * len(modes)),
        ("gradients, kept", [states.gradients_kept] * len(modes)),
        ("gradients, backward to step", [states.gradients_made] * len(modes)),
        ("gradient reduction", [states.bucket + states.reduction] * len(modes)),
        ("activations stored", [m.memory.activations.stored for m in modes]),
        ("activations of a recomputed layer", [m.memory.activations.recomputed for m in modes]),
        ("exchange buffers", [m.memory.activations.exchange for m in modes]),
        ("loss", [m.memory.activations.loss for m in modes]),
    ]
    rows = [(what, *(f"{value / GIB:,.3f}" for value in values)) for what, values in terms]
    phases = [max(m.memory.phases, key=m.memory.phases.__getitem__) for m in modes]
    rows.append(("peak", *(f"{m.memory.peak / GIB:,.3f}" for m in modes)))
    rows.append(("peak during", *phases))
    verdicts = [
        f"{'fits' if m.memory.fits else 'DOES NOT FIT'}: {m.memory.peak / device_bytes:.0%}"
        for m in modes
    ]
    rows.append((f"of {device_bytes / GIB:,.1f} GiB", *verdicts))
    echo_table(rows, ("GiB a rank", *(m.mode for m in modes)))
