"""The panels of ``diagnose shift``, drawn from stored results, and heatmaps of layers and heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ...watch.draw import DOCUMENT_COLORS, new_figure
from ..measures import FORMS, WEIGHTS, Deviation, column_bins
from .summary import Curve, ShiftSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Settings differ in dtype by colour, in weights by line.
COLORS = dict(zip(("bf16", "fp32", "fp16", "fp64"), DOCUMENT_COLORS, strict=False))
LINES = {"pretrained": "-", "random": "--"}


def draw_shift(summary: ShiftSummary) -> dict[str, Figure]:
    """Every panel that was measured: ``shift-by-shift``, ``-token``, ``-length`` and ``-head``.

    Raises:
        UserError: matplotlib is not installed.
    """
    panels: dict[str, Callable[[ShiftSummary], Figure | None]] = {
        "shift-by-shift": draw_by_shift,
        "shift-by-token": draw_by_token,
        "shift-by-length": draw_by_length,
        "shift-by-head": draw_by_head,
    }
    drawn = ((name, draw(summary)) for name, draw in panels.items())
    return {name: figure for name, figure in drawn if figure is not None}


def draw_by_shift(summary: ShiftSummary) -> Figure | None:
    """D against Delta_1: the three forms of eq. 4, weighted; bars are standard errors."""
    curves = [c for c in summary.kind("shift") if "shift" in summary.settings.panels]
    if not curves:
        return None
    figure = new_figure(width=13.0, height=4.4)
    for index, form in enumerate(reversed(FORMS)):
        axes = figure.add_subplot(1, len(FORMS), index + 1)
        for curve in curves:
            mean, error = curve.totals(form, "weighted")
            places = np.arange(len(curve.axis))
            _line(axes, curve, places, np.abs(mean), error)
            axes.set_xticks(places, [str(shift) for shift in curve.axis], rotation=60, fontsize=8)
        _finish(axes, f"D, {form} form" + (", absolute value" if form == "signed" else ""))
        axes.set_xlabel(f"shift compared with {summary.settings.reference}")
    axes = figure.axes[0]
    axes.set_ylabel(f"sum over layers and heads, {summary.settings.tokens:,} tokens")
    axes.legend(fontsize=8, loc="center right")
    return figure


def draw_by_token(summary: ShiftSummary) -> Figure | None:
    """By key column: what it adds to D, eq. 5, and the probability that lies on it."""
    curves = [c for c in summary.kind("shift") if "token" in summary.settings.panels]
    if not curves:
        return None
    figure = new_figure(width=13.0, height=4.4)
    shift = summary.settings.length_shift
    shift = shift if shift in curves[0].axis else curves[0].axis[0]
    titles = {
        "D a column, entry form": lambda d: d.columns[2],
        "D_logit, mean of absolute values": lambda d: d.logits[2],
        "mean probability on the column": lambda d: d.mass,
    }
    for index, (title, columns_of) in enumerate(titles.items()):
        axes = figure.add_subplot(1, len(titles), index + 1)
        for curve in curves:
            mean: Deviation = curve.mean(shift)
            edges = column_bins(mean.num_tokens)
            values = np.add.reduceat(columns_of(mean), edges[:-1]) / np.diff(edges)
            _line(axes, curve, edges[:-1] + 1, values)
        _finish(axes, title)
        axes.set(xscale="log", xlabel="key column, counted from 1")
    figure.axes[0].legend(fontsize=8)
    compared = f"shifts {shift} and {summary.settings.reference}"
    figure.suptitle(f"{summary.settings.tokens:,} tokens, {compared}", fontsize=11)
    return figure


def draw_by_length(summary: ShiftSummary) -> Figure | None:
    """D against length, and the first key column's share of it beside its probability."""
    curves = summary.kind("length")
    if not curves:
        return None
    figure = new_figure(width=13.0, height=4.4)
    axes, plain, share = (figure.add_subplot(1, 3, n) for n in (1, 2, 3))
    for curve in curves:
        for panel, weights in zip((axes, plain), WEIGHTS, strict=True):
            mean, error = curve.totals("entry", weights)
            _line(panel, curve, np.array(curve.axis), mean, error)
        if curve.setting.dtype != "fp64":
            _line(share, curve, np.array(curve.axis), _first_shares(curve))
    first = summary.curves[0]
    mass = [float(first.mean(at).mass[0]) for at in curves[0].axis] if first in curves else []
    if mass:
        share.plot(curves[0].axis, mass, color="black", linestyle=":", label="probability on it")
    compared = f"shifts {summary.settings.length_shift} and {summary.settings.reference}"
    _finish(axes, f"D, entry form, weighted; {compared}")
    _finish(plain, "the same without weights")
    share.set_title("first key column's share of D, weighted", fontsize=10)
    share.set_ylim(bottom=0)
    share.grid(alpha=0.3)
    share.yaxis.set_major_formatter("{x:.0%}")
    for panel in (axes, plain, share):
        panel.set_xscale("log", base=2)
        panel.set_xticks(curves[0].axis, [f"{n:,}" for n in curves[0].axis], rotation=45)
        panel.minorticks_off()
        panel.set_xlabel("tokens")
    axes.legend(fontsize=8)
    share.legend(fontsize=8)
    return figure


def draw_by_head(summary: ShiftSummary) -> Figure | None:
    """Layers x heads: D in the entry form, and the first column's share, for each setting."""
    curves = summary.kind("shift") or summary.kind("length")
    if not curves:
        return None
    at = summary.settings.length_shift if curves[0].kind == "shift" else curves[0].axis[-1]
    figure = new_figure(width=3.0 + 3.2 * len(curves), height=5.6)
    for index, curve in enumerate(curves):
        mean = curve.mean(at if at in curve.axis else curve.axis[0])
        axes = figure.add_subplot(1, len(curves), index + 1)
        image = axes.imshow(mean.heads[2, 0], aspect="auto", cmap="viridis", origin="lower")
        figure.colorbar(image, ax=axes)
        share = mean.first_share()
        axes.set_title(f"{curve.setting}\nfirst column {share:.0%} of D", fontsize=10)
        axes.set(xlabel="head", ylabel="layer")
    figure.suptitle("D, entry form, weighted, by layer and head", fontsize=11)
    return figure


def _first_shares(curve: Curve) -> np.ndarray:
    return np.array([curve.mean(at).first_share() for at in curve.axis])


def _line(
    axes: Axes,
    curve: Curve,
    x: np.ndarray,
    y: np.ndarray,
    error: np.ndarray | None = None,
) -> None:
    style: dict[str, Any] = {
        "color": COLORS[curve.setting.dtype],
        "linestyle": LINES[curve.setting.weights],
        "marker": ".",
        "markersize": 4,
        "linewidth": 1.2,
        "label": f"{curve.setting.weights} {curve.setting.dtype}",
    }
    if error is None or np.isnan(error).all():
        axes.plot(x, y, **style)
    else:
        axes.errorbar(x, y, yerr=error, elinewidth=0.8, **style)


def _finish(axes: Axes, title: str) -> None:
    axes.set_yscale("log")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
