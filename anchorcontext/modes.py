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

Controls vary a mode for experiments (:func:`with_controls`): the anchor hidden from all documents,
or at another position; documents that restart behind it; the first token of every document at
position 0; all other positions shifted. They change nothing else: what is not named here stays as
in the table.

Padding has document id ``PADDING``: it sees nothing and nothing sees it.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

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
    """Positions restart at each document: at 0, or at 1 where the anchor has 0 before them, so that
    the anchor is the natural predecessor of every document."""
    hidden_anchor: bool = False
    """Token 0 stands where the anchor would, its own document, and no other token sees it."""
    anchor_position: int = 0
    """Of the anchor, and of its copies; the other tokens keep theirs."""
    clamp_first: bool = False
    """The first token of every document has position 0, the others keep theirs. The anchor and its
    copies belong to no document here."""
    offset: int = 0
    """Added to all positions but the anchor's, its copies' and the clamped ones."""

    @property
    def has_anchor(self) -> bool:
        """Token 0 is the anchor, seen by every query or hidden."""
        return self.anchor or self.hidden_anchor

    def __str__(self) -> str:
        """The name and what is varied: ``anchor (hidden anchor, first tokens at 0)``."""
        varied = []
        if self.hidden_anchor:
            varied.append("hidden anchor")
        if self.anchor_position:
            varied.append(f"anchor at position {self.anchor_position}")
        if self.has_anchor and self.reset_positions:
            varied.append("documents restart at 1")
        if self.clamp_first:
            varied.append("first tokens at 0")
        if self.offset:
            varied.append(f"others shifted by {self.offset}")
        return f"{self.name} ({', '.join(varied)})" if varied else self.name


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


def with_controls(
    mode: str | Mode,
    *,
    anchor_visible: bool = True,
    anchor_position: int = 0,
    reset_positions: bool = False,
    clamp_first: bool = False,
    offset: int = 0,
) -> Mode:
    """A mode varied for an experiment; the defaults change nothing.

    Args:
        anchor_visible: False: the anchor is masked like a token of any other document.
        anchor_position: of the anchor (mode ``anchor``) or of its copies (``intra_doc``,
            ``intra_doc_reset``); non-negative.
        reset_positions: in mode ``anchor``, positions restart at 1 at each document.
        clamp_first: the first token of every document has position 0.
        offset: shifts all positions that nothing above fixes; non-negative.

    Raises:
        UserError: a position is negative, or the mode has no anchor to hide or to restart behind.
    """
    mode = get_mode(mode)
    for name, value in (("anchor_position", anchor_position), ("offset", offset)):
        if value < 0:
            raise UserError(f"{name} = {value}: positions are not negative; take 0 or more")
    for name, asked in (
        ("anchor_visible = False", not anchor_visible),
        ("reset_positions = True", reset_positions),
    ):
        if asked and not mode.has_anchor:
            raise UserError(
                f"{name} in mode {mode.name!r}, which has no anchor of its own: choose mode "
                "'anchor', or leave it out"
            )
    return replace(
        mode,
        anchor=mode.anchor and anchor_visible,
        hidden_anchor=mode.has_anchor and not (mode.anchor and anchor_visible),
        reset_positions=mode.reset_positions or reset_positions,
        anchor_position=anchor_position,
        clamp_first=clamp_first,
        offset=offset,
    )


def copied(mode: Mode) -> Mode:
    """The mode in which copies of the anchor compute what the one of ``mode`` does: the same
    positions, every document alone with its copy."""
    assert mode.anchor, mode
    base = MODES["intra_doc_reset" if mode.reset_positions else "intra_doc"]
    return replace(
        base,
        anchor_position=mode.anchor_position,
        clamp_first=mode.clamp_first,
        offset=mode.offset,
    )


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
    (also when the document lies in several pieces), and one more behind an anchor. ``copies`` (L,)
    bool: copies of the anchor.
    """
    doc_ids = np.asarray(doc_ids)
    if not mode.same_document:
        copies = None
    if mode.reset_positions:
        positions = _places_in_documents(doc_ids) + int(mode.has_anchor)
    else:
        positions = np.arange(len(doc_ids), dtype=np.int64)
        if copies is not None:
            positions += copies[:1] - np.cumsum(copies)
    positions += mode.offset
    if mode.clamp_first:
        own = np.arange(len(doc_ids)) if copies is None else np.flatnonzero(~copies)
        _, first = np.unique(doc_ids[own], return_index=True)
        positions[own[first]] = 0
    if copies is not None:
        positions[copies] = mode.anchor_position
    if mode.has_anchor:
        positions[:1] = mode.anchor_position
    return positions


def _places_in_documents(doc_ids: np.ndarray) -> np.ndarray:
    """int64 (L,): how many tokens of its document stand before each token."""
    order = np.argsort(doc_ids, kind="stable")
    ordered = doc_ids[order]
    first = np.r_[True, ordered[1:] != ordered[:-1]] if len(ordered) else np.zeros(0, dtype=bool)
    index = np.arange(len(ordered))
    places = np.empty(len(doc_ids), dtype=np.int64)
    places[order] = index - np.maximum.accumulate(np.where(first, index, 0))
    return places
