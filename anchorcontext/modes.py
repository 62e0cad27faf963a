"""Who sees whom and which position a token has: the only place that knows.

A *mode* is a rule over the document ids of a window. Causality always holds; on top of it query
``i`` sees key ``j <= i`` when

=================  ==========================  ==============================
mode               visible                     positions
=================  ==========================  ==============================
full               all                         0 .. L-1
intra_doc          same document               0 .. L-1
intra_doc_reset    same document               restart at each document
anchor             same document, or j = 0     0 .. L-1, the anchor has 0
=================  ==========================  ==============================

The anchor is token 0 of the window, its own document (AnchorAttention, arXiv 2411.13476,
section 4). Instead, under the other modes, every document may begin with a copy of it: in
``intra_doc`` a copy has position 0 and the other tokens keep the positions they would have without
the copies but that of token 0, so that a document computes what it does with the anchor of mode
``anchor``: the copy's keys and values depend on its id and position alone. In ``full`` and
``intra_doc_reset`` a copy is a token like any other.

Padding has document id ``PADDING``: it sees nothing and nothing sees it.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

import numpy as np

from .errors import UserError

PADDING = -1
IGNORE = -100


@dataclass(frozen=True)
class Mode:
    """One rule of visibility and positions."""

    name: str
    same_document: bool
    """A query sees keys of its own document only."""
    anchor: bool
    """Token 0 of the window is visible to every query."""
    reset_positions: bool
    """Positions restart at 0 at the first token of each document."""


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("full", same_document=False, anchor=False, reset_positions=False),
        Mode("intra_doc", same_document=True, anchor=False, reset_positions=False),
        Mode("intra_doc_reset", same_document=True, anchor=False, reset_positions=True),
        Mode("anchor", same_document=True, anchor=True, reset_positions=False),
    )
}


def get_mode(mode: str | Mode) -> Mode:
    """The mode called ``mode``.

    Raises:
        UserError: there is no such mode; the message names the nearest one.
    """
    if isinstance(mode, Mode):
        return mode
    if mode in MODES:
        return MODES[mode]
    near = difflib.get_close_matches(str(mode), MODES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UserError(f"mode {mode!r}: must be one of {', '.join(MODES)}{hint}")


def attention_groups(mode: Mode, doc_ids: np.ndarray) -> np.ndarray:
    """The document ids that attention goes by, int64 (L,): in ``full`` all tokens share one."""
    if mode.same_document:
        return doc_ids
    return np.where(doc_ids == PADDING, PADDING, 0)


def visible(mode: Mode, doc_ids: np.ndarray) -> np.ndarray:
    """The dense mask, bool (L, L): ``[i, j]`` is true when query ``i`` sees key ``j``.

    Quadratic in L: for oracles and small pictures, never for training.
    """
    doc_ids = np.asarray(doc_ids)
    groups = attention_groups(mode, doc_ids)
    index = np.arange(len(doc_ids))
    seen = groups[:, None] == groups[None, :]
    if mode.anchor:
        seen = seen | (index[None, :] == 0)
    real = doc_ids != PADDING
    return seen & (index[None, :] <= index[:, None]) & real[:, None] & real[None, :]


def position_ids(mode: Mode, doc_ids: np.ndarray, copies: np.ndarray | None = None) -> np.ndarray:
    """The RoPE position of every token, int64 (L,).

    With ``reset_positions`` a token's position is the number of tokens of its document before it
    (also when the document lies in several pieces). ``copies`` (L,) bool: copies of the anchor.
    """
    doc_ids = np.asarray(doc_ids)
    if not mode.reset_positions:
        positions = np.arange(len(doc_ids), dtype=np.int64)
        if copies is not None and mode.same_document:
            positions = np.where(copies, 0, positions - np.cumsum(copies) + copies[:1])
        return positions
    order = np.argsort(doc_ids, kind="stable")
    ordered = doc_ids[order]
    first = np.r_[True, ordered[1:] != ordered[:-1]] if len(ordered) else np.zeros(0, dtype=bool)
    index = np.arange(len(ordered))
    within = index - np.maximum.accumulate(np.where(first, index, 0))
    positions = np.empty(len(doc_ids), dtype=np.int64)
    positions[order] = within
    return positions
