"""The comparison of runs as one HTML page: the table and one plot set."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING

from ..watch.page import figures, page, table
from ..watch.run_figures import COLORS, MIB, figure_svg, spans
from .compare import Arm, Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = list[tuple[float, float]]


def comparison_page(found: Comparison) -> str:
    """The whole page.

    Raises:
        UserError: matplotlib is not installed.
    """
    names = [arm.name for arm in found.arms]
    different = found.difference_cells()
    return page(
        " / ".join(names),
        [
            "<h2>What differs in the configs</h2>",
            table(different, ("key", *names)) if different else "<p>Nothing.</p>",
            figures(comparison_figures(found)),
            "<h2>In numbers</h2>",
            table(found.cells(), ("", *names)),
            *(f"<p>Note: {escape(warning)}.</p>" for warning in found.warnings),
        ],
    )


def comparison_figures(found: Comparison) -> dict[str, str]:
    """Title -> ``<svg>``, without those that have nothing to show."""
    arms = found.arms
    panels: dict[str, Callable[[Axes], bool]] = {
        "Training loss, nats a target": lambda axes: _curves(
            axes, arms, lambda arm: _record_points(arm, "loss"), "step", "-"
        ),
        "Loss by position, nats a target": lambda axes: _curves(
            axes,
            arms,
            lambda arm: list(arm.position_curve()),
            "tokens before the target",
            "o-",
            True,
        ),
    }
    for task in _tasks(arms):
        panels[f"{task}, by length"] = _score_panel(arms, task)
    panels |= {
        "Tokens/s, median step": lambda axes: _bars(
            axes, arms, lambda arm: arm.run.summary.median_tokens_per_second
        ),
        "Peak memory of a rank, MiB": lambda axes: _bars(
            axes, arms, lambda arm: arm.run.summary.peak_memory_bytes / MIB
        ),
    }
    drawn = {title: figure_svg(draw, title) for title, draw in panels.items()}
    return {title: svg for title, svg in drawn.items() if svg is not None}


def _tasks(arms: list[Arm]) -> list[str]:
    """The tasks that have scores by length; last evaluations of the runs count too."""
    names = [name for arm in arms for name in arm.figures]
    found = [match[1] for name in names if (match := re.fullmatch(r"(.+)/\d+", name))]
    return list(dict.fromkeys(found))


def _score_panel(arms: list[Arm], task: str) -> Callable[[Axes], bool]:
    def points(arm: Arm) -> Points:
        return list(arm.score_curve(task))

    return lambda axes: _curves(axes, arms, points, "context, tokens", "o-", True)


def _record_points(arm: Arm, name: str) -> Points:
    records = [r for r in arm.run.records if r.get(name) is not None]
    if not records:
        return []
    steps, mean, _, _ = spans([r["step"] for r in records], [r[name] for r in records])
    return list(zip(steps.tolist(), mean.tolist(), strict=True))


def _curves(
    axes: Axes,
    arms: list[Arm],
    points: Callable[[Arm], Points],
    label: str,
    style: str,
    logarithmic: bool = False,
) -> bool:
    """A curve an arm; whether there is any."""
    drawn = False
    for index, arm in enumerate(arms):
        found = points(arm)
        if found:
            x, y = zip(*found, strict=True)
            color = COLORS[index % len(COLORS)]
            axes.plot(x, y, style, color=color, markersize=4, label=arm.name)
            drawn = True
    if logarithmic:
        axes.set_xscale("log", base=2)
    axes.set_xlabel(label)
    if drawn:
        axes.legend(fontsize=8)
    return drawn


def _bars(axes: Axes, arms: list[Arm], value: Callable[[Arm], float | None]) -> bool:
    values = [value(arm) or 0.0 for arm in arms]
    colors = [COLORS[index % len(COLORS)] for index in range(len(arms))]
    axes.barh([arm.name for arm in arms][::-1], values[::-1], color=colors[::-1], height=0.6)
    axes.set_xlabel(" ")
    return any(values)
