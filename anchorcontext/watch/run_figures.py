"""The curves of a run as inline SVG, coloured by the page they stand in.

Lines and text are drawn in placeholder colours, which become ``currentColor`` and the CSS variables
``--c0`` to ``--c5``: one picture for light and dark pages.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .draw import new_figure
from .history import PARTS, PROBLEMS, RunHistory, position_points, seconds_of
from .page import inline_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_POINTS = 400
"""A curve of more steps is drawn as means over spans of them, in a band from least to most."""
MIB = 2**20
INK = "#010203"
COLORS = tuple(f"#0102f{index}" for index in range(6))
SMALLEST = 1e-9
"""A difference of 0 has no place on a logarithmic axis, and is drawn here."""
_STYLE = {
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.titlesize": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "legend.frameon": False,
    "lines.linewidth": 1.3,
}


def run_figures(run: RunHistory) -> dict[str, str]:
    """The run's figures, title -> ``<svg>``; without those that have nothing to show.

    Raises:
        UserError: matplotlib is not installed.
    """
    panels: dict[str, Callable[[Axes, RunHistory], bool]] = {
        "Loss, nats a target": _loss,
        "Held-out loss by context length, nats a target": _held_out,
        "Held-out documents: loss by position": _by_position,
        "Needles found, by context length": _needles,
        "Gradient norm, before clipping": _gradient,
        "Learning rate": _learning_rate,
        "Tokens/s, whole job": _throughput,
        "Seconds of a step, by part": _seconds,
        "Sent in attention, MiB a step, all ranks": _traffic,
        "Busiest rank's attention over the mean": _balance,
        "Peak memory of a rank, MiB": _memory,
        "Largest logit difference in parity checks": _parity,
    }
    drawn = {}
    for title, draw in panels.items():
        svg = figure_svg(partial(_with_steps, draw, run), title)
        if svg is not None:
            drawn[title] = svg
    return drawn


def _with_steps(draw: Callable[[Axes, RunHistory], bool], run: RunHistory, axes: Axes) -> bool:
    """Draw a panel; its horizontal axis is the run's steps where it says nothing else."""
    if not draw(axes, run):
        return False
    if not axes.get_xlabel():
        if run.records:
            last = max(run.records[-1]["step"], 2)
            axes.set_xlim(min(run.records[0]["step"], last - 1), last)
        axes.set_xlabel("step")
    return True


def spans(
    steps: Sequence[int], values: Sequence[float], most: int = MOST_POINTS
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Last step, mean, least and most value of at most ``most`` spans of neighbouring steps."""
    count = len(steps)
    parts = np.array_split(np.arange(count), min(most, count)) if count else []
    x, y = np.asarray(steps), np.asarray(values, dtype=np.float64)
    return (
        np.array([x[part[-1]] for part in parts]),
        np.array([y[part].mean() for part in parts]),
        np.array([y[part].min() for part in parts]),
        np.array([y[part].max() for part in parts]),
    )


def figure_svg(draw: Callable[[Axes], bool], title: str) -> str | None:
    """The ``<svg>`` of what ``draw`` puts on a pair of axes; None where it says there is nothing.

    Raises:
        UserError: matplotlib is not installed.
    """
    figure = new_figure(width=4.9, height=2.5)
    import matplotlib

    # Ids are hashed with the title: several pictures share one page.
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": title}):
        axes = figure.add_subplot()
        if not draw(axes):
            return None
        # The page's own font may be wider than the one that the picture was laid out with.
        figure.set_layout_engine("constrained", w_pad=0.1)
        out = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    return _as_the_page(inline_svg(out.getvalue(), title))


def _as_the_page(svg: str) -> str:
    """In the page's font and colours, coordinates to two digits."""
    svg = re.sub(r"; font-family: [^;\"]*", "", svg)
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), svg)
    for index, color in enumerate(COLORS):
        svg = svg.replace(color, f"var(--c{index})")
    return svg.replace(INK, "currentColor")


def _series(run: RunHistory, name: str) -> tuple[list[int], list[float]]:
    found = [(r["step"], r[name]) for r in run.records if r.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def _curve(
    axes: Axes, run: RunHistory, name: str, color: int = 0, scale: float = 1.0, **style: Any
) -> bool:
    steps, values = _series(run, name)
    if not steps:
        return False
    x, mean, least, most = spans(steps, [value * scale for value in values])
    style = {"marker": "." if len(x) <= 40 else "", **style}
    axes.plot(x, mean, color=COLORS[color], **style)
    if len(steps) > len(x):
        axes.fill_between(x, least, most, color=COLORS[color], alpha=0.2, linewidth=0)
    return True


def _marks(axes: Axes, run: RunHistory) -> None:
    """Where the run went on after a start, and where something was wrong."""
    for step in sorted({event.get("step") or 0 for event in run.starts[1:]}):
        axes.axvline(step, color=INK, linewidth=0.8, linestyle=":", alpha=0.7)
    skipped = {record["step"] for record in run.records if record.get("skipped")}
    wrong = {e["step"] for e in run.events if e["event"] in PROBLEMS and e.get("step")}
    for step in sorted(skipped | wrong)[-MOST_POINTS:]:
        axes.plot([step], [0.02], "x", color=COLORS[5], transform=axes.get_xaxis_transform())


def _legend(axes: Axes, columns: int) -> None:
    """Above the axes, narrow enough for a page's wider font."""
    place: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0)}
    axes.legend(**place, ncols=columns, fontsize=8, handlelength=1.0, columnspacing=1.0)


def _loss(axes: Axes, run: RunHistory) -> bool:
    found = _curve(axes, run, "loss")
    _marks(axes, run)
    return found


def _held_out(axes: Axes, run: RunHistory) -> bool:
    return _measured(axes, run, "held_out")


def _needles(axes: Axes, run: RunHistory) -> bool:
    axes.set_ylim(-0.03, 1.03)
    return _measured(axes, run, "niah_single")


def _measured(axes: Axes, run: RunHistory, task: str) -> bool:
    """A curve over the steps for every context length of a task."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for step, values in run.evaluations.items():
        for name, value in values.items():
            if name.startswith(f"{task}/") and value is not None:
                curves.setdefault(name.removeprefix(f"{task}/"), []).append((step, value))
    for index, (length, points) in enumerate(curves.items()):
        steps, found = zip(*points, strict=True)
        color = COLORS[index % len(COLORS)]
        axes.plot(steps, found, ".-", color=color, label=f"{int(length):,}")
    axes.set_xlabel("step")
    if curves:
        _legend(axes, len(curves))
    return bool(curves)


def _by_position(axes: Axes, run: RunHistory) -> bool:
    """The first and the last evaluation; each loss at the end of its range of positions."""
    curves = [
        (step, points)
        for step, values in run.evaluations.items()
        if (points := position_points(values))
    ]
    for color, (step, points) in enumerate([curves[0], curves[-1]] if curves else []):
        x, y = zip(*points, strict=True)
        axes.plot(x, y, "o-", color=COLORS[color], markersize=4, label=f"step {step:,}")
    axes.set_xlabel("tokens before the target")
    if curves:
        axes.set_xscale("log", base=2)
        _legend(axes, 2)
    return bool(curves)


def _gradient(axes: Axes, run: RunHistory) -> bool:
    found = _curve(axes, run, "grad_norm")
    _marks(axes, run)
    return found


def _learning_rate(axes: Axes, run: RunHistory) -> bool:
    return _curve(axes, run, "lr")


def _throughput(axes: Axes, run: RunHistory) -> bool:
    found = _curve(axes, run, "tokens_per_second")
    axes.set_ylim(bottom=0)
    _marks(axes, run)
    return found


def _seconds(axes: Axes, run: RunHistory) -> bool:
    if not run.records:
        return False
    steps = [record["step"] for record in run.records]
    parts = [seconds_of(record) for record in run.records]
    means = [spans(steps, [part[name] for part in parts])[1] for name in PARTS]
    x = spans(steps, steps)[0]
    if len(x) == 1:
        axes.bar(x, [0.0])  # a single step has no width to fill
        x, means = np.array([x[0] - 0.4, x[0] + 0.4]), [np.repeat(mean, 2) for mean in means]
    axes.stackplot(x, means, labels=PARTS, colors=COLORS[: len(PARTS)], linewidth=0)
    _legend(axes, len(PARTS))
    return True


def _traffic(axes: Axes, run: RunHistory) -> bool:
    if not any(_series(run, "bytes_sent")[1]):
        return False
    _curve(axes, run, "bytes_sent", scale=1 / MIB, label="counted")
    style = {"linestyle": "--", "marker": "", "label": "predicted"}
    if _curve(axes, run, "bytes_predicted", 1, 1 / MIB, **style):
        _legend(axes, 2)
    axes.set_ylim(bottom=0)
    return True


def _balance(axes: Axes, run: RunHistory) -> bool:
    return _curve(axes, run, "attention_balance")


def _memory(axes: Axes, run: RunHistory) -> bool:
    found = _curve(axes, run, "peak_memory_bytes", scale=1 / MIB)
    axes.set_ylim(bottom=0)
    _marks(axes, run)
    return found


def _parity(axes: Axes, run: RunHistory) -> bool:
    checks = [event for event in run.events if event["event"] == "parity"]
    for passed, marker, color in ((True, "o-", 0), (False, "X", 5)):
        found = [check for check in checks if bool(check.get("passed")) == passed]
        values = [max(check.get("largest_logit_difference") or 0.0, SMALLEST) for check in found]
        steps = [check.get("step") or 0 for check in found]
        axes.plot(steps, values, marker, color=COLORS[color], markersize=4)
    axes.set_yscale("log")
    return bool(checks)
