"""Pictures of windows: who sees whom, who holds what, what travels. Drawn with matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UserError
from ..modes import MODES, Mode
from ..plan.mixes import mix_lengths
from ..window import Window
from ..words import counted
from .inspection import Inspection, inspect_window
from .mask_grid import mask_grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart with every kind of colour vision.
DOCUMENT_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442")
ANCHOR_COLOR = "#D55E00"
CAUSAL_COLOR = "#F2F2F2"
MAX_BLOCKS = 768
LAYOUTS = ("contiguous", "zigzag", "balanced")
MODE_NOTES = {
    "full": "every earlier token",
    "intra_doc": "own document",
    "intra_doc_reset": "own document, positions restart",
    "anchor": "own document and token 0",
}


def draw_window(inspection: Inspection, path: str | Path) -> None:
    """Draw one window: its mask shaded by document, rank boundaries, work and traffic per rank.

    The anchor's column is drawn at least a hundredth of the picture wide. ``path`` ends in a format
    that matplotlib knows (``.png``, ``.svg``, ``.pdf``).

    Raises:
        UserError: matplotlib is not installed, or does not know the format.
    """
    shared = inspection.plan.sp_size > 1
    figure = new_figure(width=13.0 if shared else 8.5, height=8.2)
    grid = figure.add_gridspec(2, 2 if shared else 1, width_ratios=(2, 1) if shared else (1,))
    mask = figure.add_subplot(grid[:, 0])
    _draw_mask(mask, inspection.window.mode, inspection.window.doc_ids)
    _draw_positions(mask, inspection.window)
    if shared:
        _draw_ranks(mask, inspection)
        _draw_work(figure.add_subplot(grid[0, 1]), inspection)
        _draw_traffic(figure.add_subplot(grid[1, 1]), inspection)
    window = inspection.window
    documents = len(np.unique(window.segment_docs)) - int(window.mode.has_anchor)
    figure.suptitle(
        f"{window.num_tokens:,} tokens, {counted(documents, 'document')}, mode {window.mode}: "
        f"{inspection.density:.1%} of full causal attention"
    )
    save_figure(figure, path)


def draw_modes(path: str | Path, lengths: tuple[int, ...] = (6, 8, 5)) -> None:
    """Draw the four modes side by side on one small window behind an anchor, with positions.

    Raises:
        UserError: matplotlib is not installed, or does not know the format.
    """
    window = Window.from_documents([[0] * length for length in lengths], anchor_id=0)
    figure = new_figure(width=16.0, height=4.7)
    for index, mode in enumerate(MODES.values()):
        axes = figure.add_subplot(1, len(MODES), index + 1)
        _draw_mask(axes, mode, window.doc_ids)
        axes.set_title(f"{mode.name}\n{MODE_NOTES[mode.name]}", fontsize=11)
        ticks = np.arange(window.num_tokens) + 0.5
        positions = window.with_mode(mode).position_ids
        axes.set_xticks(ticks, [str(position) for position in positions], fontsize=6)
        axes.set_xlabel("keys, labelled with their positions")
        axes.set_yticks(ticks, ["BOS", *map(str, range(1, window.num_tokens))], fontsize=6)
        for edge in range(window.num_tokens + 1):
            axes.axhline(edge, color="white", linewidth=0.8)
            axes.axvline(edge, color="white", linewidth=0.8)
    save_figure(figure, path)


def draw_layouts(path: str | Path, window_tokens: int = 131072, sp: int = 8, seed: int = 0) -> None:
    """Draw every layout of one window of the mix ``upsampled`` in mode ``anchor``: pairs per rank
    and the key rows that travel.

    Raises:
        UserError: matplotlib is not installed, or does not know the format.
    """
    lengths = mix_lengths("upsampled", window_tokens - 1, seed)
    window = Window.from_documents([[0] * int(n) for n in lengths], anchor_id=0, mode="anchor")
    figure = new_figure(width=13.0, height=8.2)
    for index, layout in enumerate(LAYOUTS):
        inspection = inspect_window(window, sp=sp, layout=layout, exchange="gather")
        work, traffic = (figure.add_subplot(2, len(LAYOUTS), index + k) for k in (1, 4))
        _draw_work(work, inspection)
        work.set_title(f"{layout}\n{work.get_title()}")
        _draw_traffic(traffic, inspection)
    documents, ranks = counted(len(lengths), "document"), counted(sp, "rank")
    figure.suptitle(f"{window_tokens:,} tokens, {documents}, {ranks}, mode anchor")
    save_figure(figure, path)


def mask_image(mode: Mode, doc_ids: np.ndarray, max_blocks: int = MAX_BLOCKS) -> np.ndarray:
    """The mask as an RGB picture, float64 (n, n, 3) in 0..1, row 0 is the first query.

    A visible block has its query's document colour, the anchor's column its own; a block of which
    only a part is visible is paler.
    """
    from matplotlib.colors import to_rgb

    grid = mask_grid(mode, doc_ids, max_blocks)
    palette = np.array([to_rgb(color) for color in DOCUMENT_COLORS])
    anchor, hidden = np.array(to_rgb(ANCHOR_COLOR)), np.array(to_rgb(CAUSAL_COLOR))
    middle = (grid.edges[:-1] + grid.edges[1:]) // 2
    color = np.repeat(palette[doc_ids[middle] % len(palette)][:, None], len(middle), axis=1)
    if mode.anchor:
        color[:, 0] = anchor
    # The root keeps a block visible of which a document sees only a sliver.
    weight = np.sqrt(grid.fraction)[..., None]
    image = weight * color + (1 - weight) * hidden
    image[np.triu_indices(len(middle), 1)] = 1.0
    return image


def _draw_mask(axes: Axes, mode: Mode, doc_ids: np.ndarray) -> None:
    length = len(doc_ids)
    extent = (0, length, length, 0)
    axes.imshow(mask_image(mode, doc_ids), extent=extent, interpolation="nearest", aspect="equal")
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    if mode.anchor and length > MAX_BLOCKS:
        axes.axvspan(0, length / 100, color=ANCHOR_COLOR, linewidth=0, zorder=2)


def _draw_positions(axes: Axes, window: Window) -> None:
    """Below the keys, where a token's position is not its place: the position of each."""
    positions = window.position_ids
    if np.array_equal(positions, np.arange(window.num_tokens)):
        return
    below = axes.inset_axes((0, -0.19, 1, 0.1))
    below.plot(np.arange(window.num_tokens) + 0.5, positions, ".", color="black", markersize=2)
    below.set(xlim=(0, window.num_tokens), xticks=[])
    below.set_xlabel("key, and above it its position")
    axes.set_xlabel("")


def _draw_ranks(axes: Axes, inspection: Inspection) -> None:
    """Strips beside the mask: the rank that holds each query and each key, with the boundaries."""
    plan, length = inspection.plan, inspection.window.num_tokens
    runs = plan.runs[0][np.argsort(plan.runs[0][:, 0])]
    queries = axes.inset_axes((-0.045, 0, 0.03, 1))
    keys = axes.inset_axes((0, 1.015, 1, 0.03))
    for start, stop, rank in runs.tolist():
        stop = min(stop, length)
        if start >= stop:
            continue
        color = _rank_color(rank, plan.sp_size)
        queries.axhspan(start, stop, color=color)
        keys.axvspan(start, stop, color=color)
        if len(runs) <= 32:
            middle = (start + stop) / 2
            label: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8}
            queries.text(0.5, middle, str(rank), **label)
            keys.text(middle, 0.5, str(rank), **label)
        if start:
            axes.axhline(start, color="black", linewidth=0.5, alpha=0.6)
    queries.set(ylim=(length, 0), xlim=(0, 1), xticks=[])
    keys.set(xlim=(0, length), ylim=(0, 1), xticks=[], yticks=[])
    queries.set_ylabel("query, and the rank that holds it")
    keys.set_title("key, and the rank that holds it", fontsize=10)
    axes.set(ylabel="", yticks=[])


def _draw_work(axes: Axes, inspection: Inspection) -> None:
    ranks = [row.rank for row in inspection.ranks]
    pairs = [row.pairs for row in inspection.ranks]
    axes.bar(ranks, pairs, color=[_rank_color(rank, len(ranks)) for rank in ranks])
    axes.axhline(sum(pairs) / len(pairs), color="black", linewidth=1, linestyle="--")
    axes.set_title(f"attention pairs per rank\nbusiest {inspection.balance:.2f} x the mean")
    axes.set_xlabel("rank")
    _few_ticks(axes, ranks)


def _draw_traffic(axes: Axes, inspection: Inspection) -> None:
    traffic = inspection.traffic
    axes.imshow(traffic, cmap="Greys", vmin=0, vmax=max(int(traffic.max()), 1) * 1.4)
    if len(traffic) <= 8:
        for (sender, receiver), rows in np.ndenumerate(traffic):
            if rows:
                axes.text(receiver, sender, f"{rows:,}", ha="center", va="center", fontsize=8)
    share = inspection.rows_moved / max(inspection.rows_unpruned, 1)
    axes.set_title(
        f"key rows sent, one forward of one layer\n{inspection.rows_moved:,} rows, "
        f"{share:.1%} of an unpruned ring"
    )
    axes.set(xlabel="receiver", ylabel="sender")
    ranks = list(range(len(traffic)))
    _few_ticks(axes, ranks)
    axes.set_yticks(axes.get_xticks())


def _few_ticks(axes: Axes, ranks: list[int]) -> None:
    axes.set_xticks(ranks[:: -(-len(ranks) // 16)])


def _rank_color(rank: int, sp_size: int) -> tuple[float, float, float]:
    """Light blues and greys, different for neighbours: the documents keep the strong colours."""
    shade = 0.55 + 0.35 * (rank / max(sp_size - 1, 1))
    return (shade, shade, min(1.0, shade + 0.08)) if rank % 2 else (shade * 0.85, shade * 0.95, 1.0)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches that opens no window.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(f"drawing needs matplotlib ({error}): pip install matplotlib") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure in the format that ``path`` ends in; the same picture gives the same file.

    Raises:
        UserError: matplotlib does not know the format.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    try:
        # Without the program's version the same picture is the same file.
        stable = {"Software": None} if Path(path).suffix == ".png" else None
        figure.savefig(path, dpi=120, metadata=stable)
    except ValueError as error:
        raise UserError(f"cannot draw to {str(path)!r}: {error}; end it in .png or .svg") from None
