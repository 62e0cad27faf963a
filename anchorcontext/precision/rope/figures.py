"""Figures of ``diagnose rope``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .measure import Split
from .sheet import find, mean_shares, mean_total
from .stages import STAGES, parse_stack

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINE: dict[str, Any] = {"marker": ".", "linewidth": 1}


def draw_rope(splits: Sequence[Split], shift: int) -> dict[str, Figure]:
    """``rope-parts``: stacked parts of the deviation by stack; ``rope-offset``: against offset.

    Raises:
        UserError: matplotlib is not installed.
    """
    from ...watch.draw import new_figure

    sources = list(dict.fromkeys(s.source for s in splits))
    drawn = {}
    for name, draw in (("rope-parts", _draw_parts), ("rope-offset", _draw_offsets)):
        figure = new_figure(width=4.6 * len(sources), height=4.6)
        for index, source in enumerate(sources):
            axes = figure.add_subplot(1, len(sources), index + 1)
            own = [s for s in splits if s.source == source]
            draw(axes, own)
            axes.set_title(source, fontsize=10)
        figure.axes[0].legend(fontsize=7)
        figure.suptitle(
            f"D of one layer, entry form, weighted, under a shift of {shift}", fontsize=11
        )
        drawn[name] = figure
    return drawn


def _whole_stacks(own: Sequence[Split]) -> list[str]:
    """Stacks that round at more than one stage."""
    return [s for s in dict.fromkeys(s.stack for s in own) if len(parse_stack(s).rounds) > 1]


def _draw_parts(axes: Any, own: Sequence[Split]) -> None:
    offset = min(s.offset for s in own)
    stacks = [s for s in _whole_stacks(own) if s.endswith(":bf16")]
    bottom = np.zeros(len(stacks))
    from matplotlib import colormaps

    for index, stage in enumerate(STAGES[:-2]):
        heights = []
        for stack in stacks:
            at = find(own, stack=stack, offset=offset)
            whole = mean_total(at, "twin", "probability")
            heights.append(whole * mean_shares(at, "twin", "probability")[stage])
        if max(np.abs(heights)) > 0:
            axes.bar(stacks, heights, bottom=bottom, label=stage, color=colormaps["tab20"](index))
            bottom += np.array(heights)
    axes.tick_params(axis="x", rotation=75, labelsize=7)
    axes.set_ylabel(f"D, offset {offset:,}")


def _draw_offsets(axes: Any, own: Sequence[Split]) -> None:
    offsets = sorted({s.offset for s in own})
    from matplotlib import colormaps

    for index, stack in enumerate(_whole_stacks(own)):
        values = [
            mean_total(find(own, stack=stack, offset=o), "twin", "probability") for o in offsets
        ]
        axes.plot(range(len(offsets)), values, color=colormaps["tab20"](index), **LINE, label=stack)
    axes.set(yscale="log", xlabel="position of the first token")
    axes.set_xticks(range(len(offsets)), [f"{o:,}" for o in offsets])
    axes.grid(alpha=0.3)
