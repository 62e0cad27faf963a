"""Tables, readings and figures of ``diagnose gradients``.

Readings state what the numbers say; the thresholds they use are the constants below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from ...words import counted
from ..sheet import LARGER, Sheet, Table
from .compare import GROUPS, HEADS, Apart, layer_of, total
from .measure import GradientArm, GradientResult, GradientSettings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A control helps from this reduction of the distance on.
HELPS = 0.05
SHOWN_LAYERS = 6


def gradient_sheet(
    settings: GradientSettings, results: Sequence[GradientResult], *, command: str, made: list[str]
) -> Sheet:
    """Everything that was measured."""
    return Sheet(
        name="gradients",
        title="Gradients",
        command=command,
        made=made,
        settings=asdict(settings),
        readings=gradient_readings(results),
        tables=[_whole(settings, results), _groups(results), _layers(results)],
    )


def distance(result: GradientResult, against: str = "fp32", **wanted: object) -> float:
    """|a - r| / |r|, mean over texts; of all parameters, or of a group, a layer (see
    :func:`~.compare.total`)."""
    return _mean(result, against, lambda apart: apart.relative, **wanted)


def _mean(
    result: GradientResult, against: str, value: Callable[[Apart], float], **wanted: object
) -> float:
    return float(np.mean([value(total(by, **wanted)) for by in result.against[against]]))


def gradient_readings(results: Sequence[GradientResult]) -> list[str]:
    """What the arms say."""
    arms = {r.arm: r for r in results}
    return [
        *_dtype(arms),
        *_controls(arms),
        *_weights(arms),
        *_shifts(arms),
        *_places(arms),
    ]


def _dtype(arms: dict[str, GradientResult]) -> list[str]:
    if "bf16" not in arms:
        return []
    cosine = _mean(arms["bf16"], "fp32", lambda apart: apart.cosine)
    return [
        f"bf16's gradient is {distance(arms['bf16']):.1%} away from fp32's with the same weights "
        f"(cosine {cosine:.5f})."
    ]


def _controls(arms: dict[str, GradientResult]) -> list[str]:
    """Which control brings bf16's gradient nearest to fp32's."""
    found = {
        arm: distance(result)
        for arm, result in arms.items()
        if arm.startswith("bf16+") and "@" not in arm
    }
    if "bf16" not in arms or not found:
        return []
    plain = distance(arms["bf16"])
    listed = ", ".join(f"{arm[5:]} {value:.2%}" for arm, value in found.items())
    best = min(found, key=lambda arm: found[arm])
    gain = 1 - found[best] / plain if plain else 0.0
    chance = _chance(arms)
    if gain >= max(HELPS, chance):
        verdict = f"{best[5:]} comes nearest, {gain:.0%} nearer"
    elif gain >= HELPS:
        verdict = (
            f"{best[5:]} comes nearest, {gain:.0%} nearer, but a shift alone, which should change "
            f"nothing, changes such distances by up to {chance:.0%}: no control is told from chance"
        )
    else:
        verdict = f"none comes {HELPS:.0%} nearer: bf16's gradient is not lost there"
    return [f"With controls in fp32 that distance is {listed} (none: {plain:.2%}): {verdict}."]


def _chance(arms: dict[str, GradientResult]) -> float:
    """How much the distance to fp32 of one arm changes with positions shifted, the largest ratio
    over all bf16 arms."""
    found = [0.0]
    for arm, result in arms.items():
        base = arms.get(GradientArm.parse(arm).base)
        if arm.startswith("bf16") and base is not None and base is not result and distance(base):
            found.append(abs(distance(result) / distance(base) - 1))
    return max(found)


def _weights(arms: dict[str, GradientResult]) -> list[str]:
    if "fp32+weights" not in arms or "bf16" not in arms:
        return []
    weights, arithmetic = distance(arms["fp32+weights"]), distance(arms["bf16"])
    which = _larger(arithmetic, weights, "bf16 arithmetic", "rounding the weights to bf16")
    return [
        f"Rounding the weights alone moves fp32's gradient by {weights:.1%}, bf16 arithmetic moves "
        f"it by {arithmetic:.1%}: {which}."
    ]


def _larger(one: float, other: float, name: str, other_name: str) -> str:
    if one >= LARGER * other:
        return f"{name} does more"
    if other >= LARGER * one:
        return f"{other_name} does more"
    return "they do about the same"


def _shifts(arms: dict[str, GradientResult]) -> list[str]:
    readings = []
    for arm, result in arms.items():
        if "unshifted" not in result.against:
            continue
        moved = distance(result, "unshifted")
        base = GradientArm.parse(arm).base
        text = f"{base}: a shift of {arm.partition('@')[2]} moves the gradient by {moved:.2%}"
        if base in arms:
            size = distance(arms[base])
            which = _larger(moved, size, "the shift", "the dtype")
            text += f", the dtype by {size:.2%}: {which}"
        readings.append(text + ".")
    return readings


def _places(arms: dict[str, GradientResult]) -> list[str]:
    """Where bf16's gradient is furthest from fp32's."""
    if "bf16" not in arms:
        return []
    result = arms["bf16"]
    groups = {g: distance(result, group=g) for g in _group_names(result)}
    worst = max(groups, key=lambda group: groups[group])
    best = min(groups, key=lambda group: groups[group])
    layers = {layer: _layer(result, layer) for layer in _layer_numbers(result)}
    far = max(layers, key=lambda layer: layers[layer])
    near = min(layers, key=lambda layer: layers[layer])
    return [
        f"bf16 is furthest from fp32 in {worst} ({groups[worst]:.1%}) and nearest in {best} "
        f"({groups[best]:.1%}); by layer furthest in {far} ({layers[far]:.1%}), nearest in {near} "
        f"({layers[near]:.1%})."
    ]


def _group_names(result: GradientResult) -> list[str]:
    first = result.against["fp32"][0]
    return [g for g in (*GROUPS, *HEADS) if total(first, group=g).reference]


def _layer_numbers(result: GradientResult) -> list[int]:
    found = {layer_of(name) for name in result.against["fp32"][0]}
    return sorted(layer for layer in found if layer is not None)


def _layer(result: GradientResult, layer: int, against: str = "fp32") -> float:
    return distance(result, against, layer=layer)


def _whole(settings: GradientSettings, results: Sequence[GradientResult]) -> Table:
    rows: list[list[Any]] = []
    for result in results:
        for against in result.against:
            rows.append(
                [
                    result.arm,
                    against,
                    float(np.mean(result.losses)),
                    f"{_mean(result, against, lambda a: a.cosine):.6f}",
                    f"{distance(result, against):.3%}",
                    f"{_mean(result, against, lambda a: a.norm_ratio):.4f}",
                    *(f"{distance(result, against, group=head):.3%}" for head in HEADS),
                ]
            )
    count = max((len(r.losses) for r in results), default=0)
    return Table(
        f"Gradient of the mean loss of a text of {settings.tokens:,} tokens, "
        f"{counted(count, 'text')}: cosine, |a - r| / |r| and |a| / |r| over all parameters; "
        "the distance of dq and dk, before RoPE, over all layers. fp32: the reference, fp32 with "
        "weights rounded to bf16 at shift 0; unshifted: the same arm at shift 0.",
        ["arm", "against", "loss", "cosine", "distance", "norm ratio", "dq", "dk"],
        rows,
    )


def _groups(results: Sequence[GradientResult]) -> Table:
    names = _group_names(results[0]) if results else []
    rows: list[list[Any]] = [
        [r.arm, *(f"{distance(r, group=name):.2%}" for name in names)] for r in results
    ]
    return Table("Distance to fp32 by group.", ["arm", *names], rows)


def _layers(results: Sequence[GradientResult]) -> Table:
    numbers = _layer_numbers(results[0]) if results else []
    shown = sorted({numbers[round(i)] for i in np.linspace(0, len(numbers) - 1, SHOWN_LAYERS)})
    rows: list[list[Any]] = [
        [r.arm, *(f"{_layer(r, number):.2%}" for number in shown)] for r in results
    ]
    return Table(
        "Distance to fp32 by layer, parameters.", ["arm", *(f"layer {n}" for n in shown)], rows
    )


def draw_gradients(results: Sequence[GradientResult]) -> dict[str, Figure]:
    """``gradients-layers``: distance to fp32 by layer, of parameters, dq and dk; and, of shifted
    arms, to the unshifted.

    Raises:
        UserError: matplotlib is not installed.
    """
    from ...watch.draw import new_figure

    panels: list[tuple[str, str, dict[str, object]]] = [
        ("parameters, against fp32", "fp32", {}),
        ("dq, against fp32", "fp32", {"group": "dq"}),
        ("dk, against fp32", "fp32", {"group": "dk"}),
        ("parameters, against unshifted", "unshifted", {}),
    ]
    figure = new_figure(width=15.0, height=4.2)
    for index, (title, against, wanted) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), index + 1)
        for result in results:
            if against not in result.against or (against == "fp32" and "@" in result.arm):
                continue
            layers = _layer_numbers(result)
            values = [distance(result, against, layer=n, **wanted) for n in layers]
            axes.plot(layers, values, marker=".", linewidth=1, label=result.arm)
        axes.set(yscale="log", xlabel="layer")
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=6)
    figure.axes[0].set_ylabel("|a - r| / |r|")
    return {"gradients-layers": figure}
