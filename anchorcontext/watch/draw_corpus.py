"""A picture of a prepared corpus: how long its documents are, and one of its packed windows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..data.report import PrepareReport
from ..window import Window
from ..words import counted
from .draw import DOCUMENT_COLORS, mask_image, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_corpus(report: PrepareReport, window: Window, path: str | Path) -> None:
    """Draw the shares of documents and of tokens by document length, and the mask of ``window``.

    Raises:
        UserError: matplotlib is not installed, or does not know the format of ``path``.
    """
    figure = new_figure(width=13.0, height=5.6)
    lengths, mask = figure.subplots(1, 2, width_ratios=(1.3, 1))
    _draw_lengths(lengths, report)
    mask.imshow(
        mask_image(window.mode, window.doc_ids),
        extent=(0, window.num_tokens, window.num_tokens, 0),
        interpolation="nearest",
    )
    documents = len(np.unique(window.segment_docs)) - int(window.mode.has_anchor)
    mask.set(xlabel="key", ylabel="query")
    mask.set_title(
        f"one of {counted(report.windows, 'window')}, mode {window.mode}, documents in it: "
        f"{documents}"
    )
    figure.suptitle(
        f"{counted(report.documents, 'document')}, {report.tokens_in:,} tokens, "
        f"{report.tokens_kept:,} kept"
    )
    save_figure(figure, path)


def _draw_lengths(axes: Axes, report: PrepareReport) -> None:
    """Two bars a bin of lengths: how many of the documents, and how many of the tokens."""
    bins = report.length_histogram
    place = np.arange(len(bins))
    for offset, name, color in (
        (-0.2, "documents", DOCUMENT_COLORS[0]),
        (0.2, "tokens", DOCUMENT_COLORS[1]),
    ):
        counts = np.array([getattr(entry, name) for entry in bins], dtype=np.float64)
        shares = 100 * counts / max(counts.sum(), 1)
        axes.bar(place + offset, shares, width=0.4, color=color, label=name)
    axes.set_xticks(place, [f"{entry.at_least:,}" for entry in bins], rotation=45, ha="right")
    axes.set(xlabel="tokens of the document, at least", ylabel="% of all")
    axes.set_title("lengths of the documents")
    axes.legend(frameon=False)
