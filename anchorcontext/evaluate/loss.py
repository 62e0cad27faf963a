"""Held-out loss at chosen context lengths: the same targets, each seeing at most so many tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ..data.store import WindowDataset, WindowRecord
from ..errors import UserError
from ..modes import IGNORE, get_mode, position_ids
from ..window import Window
from .probes import NOT_COUNTED, Probe, ProbesOnDemand
from .tally import Tally


def held_out_probes(
    dataset: WindowDataset,
    lengths: Sequence[int],
    view: Callable[[WindowRecord], Window],
    num_windows: int | None = None,
) -> Sequence[Probe]:
    """The first windows of a split at every context length; group g is ``lengths[g]``.

    Args:
        dataset: the validation split.
        lengths: context lengths; the window's own leaves it as it is.
        view: makes windows of records, as in training, which this is to be compared with.
        num_windows: default: all.

    Raises:
        UserError: the split holds no window, or a length is not within 2 and the window's.
    """
    if len(dataset) == 0:
        raise UserError(
            f"the split {dataset.split!r} of {dataset.path} holds no window: raise "
            "data.validation_fraction and prepare again, or evaluate nothing held out"
        )
    for length in lengths:
        if not 2 <= length <= dataset.window_tokens:
            raise UserError(
                f"a context of {length} tokens in windows of {dataset.window_tokens}: set "
                f"evaluate.lengths to values from 2 to {dataset.window_tokens}"
            )
    count = len(dataset) if num_windows is None else min(num_windows, len(dataset))

    def probe(number: int) -> Probe:
        group, index = divmod(number, count)
        window = view(dataset[index])
        groups = np.where(window.labels != IGNORE, group, NOT_COUNTED)
        return Probe(limit_context(window, lengths[group]), groups)

    return ProbesOnDemand(count * len(lengths), probe)


def held_out_losses(found: Tally, lengths: Sequence[int]) -> dict[int, float | None]:
    """Loss per target by context length, nats; None without targets."""
    return {length: found.mean_loss(slice(g, g + 1)) for g, length in enumerate(lengths)}


def limit_context(window: Window, length: int) -> Window:
    """The same tokens and the same targets, with documents cut every ``length`` tokens.

    A token sees its own piece of its document (in mode ``anchor`` the anchor too), so that at most
    ``length`` tokens precede a target. In mode ``full`` the window is cut, and each piece is read
    alone, from position 0. The last token of a piece still predicts the next piece's first.
    """
    if length >= window.num_tokens:
        return window
    whole = not window.mode.same_document
    documents = np.zeros_like(window.doc_ids) if whole else window.doc_ids
    places = position_ids(get_mode("intra_doc_reset"), documents)
    pieces = places // length
    if not pieces.any():
        return window
    inside = np.flatnonzero((places % length == 0) & (pieces > 0))
    runs = np.array([0, window.num_tokens]) if whole else window.cu_seqlens
    edges = np.union1d(runs, inside)
    starts = edges[:-1]
    keys = np.stack([documents[starts], pieces[starts]])
    _, segment_docs = np.unique(keys, axis=1, return_inverse=True)
    copies, mode = window.anchor_copies, window.mode
    if whole:
        mode = replace(mode, name="intra_doc_reset", same_document=True, reset_positions=True)
    return Window(
        window.input_ids,
        edges,
        mode,
        segment_docs=segment_docs.reshape(-1),
        # Which tokens are targets is the mask's to say alone: the whole window's own ones.
        boundary="train",
        loss_mask=np.r_[False, window.labels[:-1] != IGNORE],
        copies=None if whole or copies is None else copies[starts],
    )
