"""Mask and positions of a window, written out token by token from the table of modes.

What stock transformers is told must not come from the code that is judged: nothing here is shared
with :mod:`anchorcontext.modes` but the names and fields of a mode. For windows of
``parity.stock_tokens``, not for training lengths.
"""

from __future__ import annotations

import numpy as np

from ..window import Window


def expected_mask(window: Window) -> np.ndarray:
    """bool (L, L): query i sees key j."""
    documents, mode = window.doc_ids, window.mode
    mask = np.zeros((window.num_tokens, window.num_tokens), dtype=bool)
    for query, document in enumerate(documents):
        mask[query, : query + 1] = mode.name == "full" or documents[: query + 1] == document
        if mode.name == "anchor" and not mode.hidden_anchor:
            mask[query, 0] = True
    return mask


def expected_positions(window: Window) -> np.ndarray:
    """int64 (L,): the RoPE position of every token."""
    mode = window.mode
    copies = np.zeros(window.num_tokens, dtype=bool)
    if window.anchor_copies is not None and mode.name != "full":
        copies = window.anchor_copies
    positions = []
    place = int(copies[0])  # a copy in front stands for token 0 of a window with a shared anchor
    before: dict[int, int] = {}  # tokens of each document so far, its copy included
    begun = set()
    for token, document in enumerate(window.doc_ids.tolist()):
        within = before.get(document, 0)
        if copies[token] or (mode.name == "anchor" and token == 0):
            positions.append(mode.anchor_position)
        elif mode.clamp_first and document not in begun:
            positions.append(0)
        elif mode.reset_positions:
            positions.append(within + (mode.name == "anchor") + mode.offset)
        else:
            positions.append(place + mode.offset)
        if not copies[token]:
            begun.add(document)
            place += 1
        before[document] = within + 1
    return np.array(positions, dtype=np.int64)
