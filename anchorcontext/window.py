"""A window: one packed training sequence with its documents, positions and labels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from .errors import UserError
from .modes import IGNORE, Mode, copied, get_mode, position_ids
from .words import counted

BOUNDARIES = ("mask", "train")


class Window:
    """One packed training sequence of L tokens; immutable.

    Args:
        input_ids: (L,) token ids, any integer sequence, array or tensor.
        cu_seqlens: (n + 1,) cumulative token counts of the window's n runs of tokens,
            ``[0, ..., L]``. Each run is a document unless ``segment_docs`` says otherwise.
        mode: who sees whom and which positions (see :mod:`anchorcontext.modes`).
        segment_docs: (n,) the document of each run, non-negative; a document that lies in several
            runs (interleaved documents) repeats. Default: 0 .. n-1.
        boundary: ``"mask"``: the last token of each run has no target, so no token is predicted
            across a boundary (the anchor, a document of one token, therefore has none);
            ``"train"``: it predicts the next token of the window, as plain packing does.
        loss_mask: (L,) bool, tokens that may be a *target*; default all.
        copies: (n,) bool, runs that are a copy of the anchor: one token, in front of its document
            and of that document. Where documents see only themselves, copies stand in for the
            anchor of mode ``anchor``, with the same result (see :mod:`anchorcontext.modes`).
            Default: none.

    ``labels[i]`` is the target of position i, shifted once here on the whole window, so that no
    shard ever shifts (``-100``: no target).

    Raises:
        UserError: the pieces do not describe one window; the message names value, rule and fix.
    """

    def __init__(
        self,
        input_ids: Any,
        cu_seqlens: Any,
        mode: str | Mode = "anchor",
        *,
        segment_docs: Any = None,
        boundary: str = "mask",
        loss_mask: Any = None,
        copies: Any = None,
    ) -> None:
        self.input_ids = _int_vector("input_ids", input_ids)
        self.cu_seqlens = _int_vector("cu_seqlens", cu_seqlens)
        self.mode = get_mode(mode)
        self.boundary = boundary
        num_runs = max(len(self.cu_seqlens) - 1, 0)
        docs = np.arange(num_runs) if segment_docs is None else segment_docs
        self.segment_docs = _int_vector("segment_docs", docs)
        self._loss_mask = None if loss_mask is None else _readonly(np.asarray(loss_mask, bool))
        self._copies = None if copies is None else _readonly(np.asarray(copies, bool))
        self._validate()

    @classmethod
    def from_documents(
        cls,
        documents: Sequence[Sequence[int]],
        anchor_id: int | None = None,
        mode: str | Mode = "anchor",
        *,
        boundary: str = "mask",
    ) -> Window:
        """Pack ``documents`` (token ids each) behind the token ``anchor_id`` (None: no anchor)."""
        parts = [np.asarray(document, dtype=np.int64) for document in documents]
        if anchor_id is not None:
            parts = [np.array([anchor_id], dtype=np.int64), *parts]
        lengths = [len(part) for part in parts]
        ids = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        return cls(ids, np.cumsum([0, *lengths]), mode, boundary=boundary)

    def with_mode(self, mode: str | Mode) -> Window:
        """The same tokens and documents under another mode."""
        return Window(
            self.input_ids,
            self.cu_seqlens,
            mode,
            segment_docs=self.segment_docs,
            boundary=self.boundary,
            loss_mask=self._loss_mask,
            copies=self._copies,
        )

    def with_anchor_copies(self) -> Window:
        """The same documents with a copy of the anchor in front of each, instead of one anchor that
        all of them see: one token longer for every document but the first, with the same result.

        Raises:
            UserError: the window has no anchor that documents see, or ``boundary`` is ``"train"``,
                under which a document's last token would predict the next one's copy.
        """
        if not self.mode.anchor:
            raise UserError(
                f"copies of the anchor in mode {str(self.mode)!r}: no anchor is seen there; choose "
                "mode 'anchor'"
            )
        if self.boundary == "train":
            raise UserError(
                "copies of the anchor with boundary = 'train': the last token of a document would "
                "have to predict a copy; set boundary to 'mask'"
            )
        docs, edges = self.segment_docs[1:], self.cu_seqlens[1:]
        begins = np.zeros(len(docs), dtype=bool)
        begins[np.unique(docs, return_index=True)[1]] = True
        # A run that begins a document gets a run of one token, the copy, before it.
        at = np.flatnonzero(begins)
        lengths = np.insert(np.diff(edges), at, 1)
        places = edges[:-1][at] - 1
        ids, mask = self.input_ids[1:], self.loss_mask[1:]
        return Window(
            np.insert(ids, places, self.input_ids[0]),
            np.cumsum([0, *lengths]),
            copied(self.mode),
            segment_docs=np.insert(docs, at, docs[at]),
            boundary=self.boundary,
            loss_mask=np.insert(mask, places, False),
            copies=np.insert(np.zeros(len(docs), dtype=bool), at, True),
        )

    def prefix(self, num_tokens: int) -> Window:
        """The first ``num_tokens`` tokens as a window; visibility and positions stay the same."""
        stop = min(num_tokens, self.num_tokens)
        if stop < 1:
            raise UserError(f"num_tokens = {num_tokens}: a window has at least one token")
        num_runs = int(np.searchsorted(self.cu_seqlens, stop, side="left"))
        return Window(
            self.input_ids[:stop],
            np.r_[self.cu_seqlens[:num_runs], stop],
            self.mode,
            segment_docs=self.segment_docs[:num_runs],
            boundary=self.boundary,
            loss_mask=None if self._loss_mask is None else self._loss_mask[:stop],
            copies=None if self._copies is None else self._copies[:num_runs],
        )

    @property
    def num_tokens(self) -> int:
        """L, the number of tokens."""
        return len(self.input_ids)

    @cached_property
    def doc_ids(self) -> np.ndarray:
        """(L,) int64, the document of each token."""
        return _readonly(np.repeat(self.segment_docs, np.diff(self.cu_seqlens)))

    @cached_property
    def position_ids(self) -> np.ndarray:
        """(L,) int64, the RoPE position of each token."""
        return _readonly(position_ids(self.mode, self.doc_ids, self.anchor_copies))

    @cached_property
    def anchor_copies(self) -> np.ndarray | None:
        """(L,) bool, the tokens that are a copy of the anchor; None where there is none."""
        if not self.run_is_copy.any():
            return None
        return _readonly(np.repeat(self.run_is_copy, np.diff(self.cu_seqlens)))

    @property
    def run_is_copy(self) -> np.ndarray:
        """(n,) bool, the runs that are a copy of the anchor."""
        if self._copies is None:
            return _readonly(np.zeros(len(self.segment_docs), dtype=bool))
        return self._copies

    @property
    def loss_mask(self) -> np.ndarray:
        """(L,) bool, the tokens that may be a target."""
        if self._loss_mask is None:
            return _readonly(np.ones(self.num_tokens, dtype=bool))
        return self._loss_mask

    @cached_property
    def labels(self) -> np.ndarray:
        """(L,) int64, the target of each position, ``-100`` where there is none."""
        labels = np.full(self.num_tokens, IGNORE, dtype=np.int64)
        labels[:-1] = self.input_ids[1:]
        if self._loss_mask is not None:
            labels[:-1][~self._loss_mask[1:]] = IGNORE
        if self.boundary == "mask":
            labels[self.cu_seqlens[1:] - 1] = IGNORE
        return _readonly(labels)

    @property
    def num_targets(self) -> int:
        """Number of positions that have a target."""
        return int((self.labels != IGNORE).sum())

    def __repr__(self) -> str:
        tokens = counted(self.num_tokens, "token")
        documents = counted(len(np.unique(self.segment_docs)), "document")
        return f"Window({tokens}, {documents}, mode={str(self.mode)!r})"

    def _validate(self) -> None:
        length, edges = self.num_tokens, self.cu_seqlens
        if length == 0:
            raise UserError("input_ids is empty: a window has at least one token")
        if len(edges) < 2 or edges[0] != 0 or edges[-1] != length:
            raise UserError(
                f"cu_seqlens = {_brief(edges)} for {length} tokens: it must start with 0 and end "
                f"with the number of tokens; give [0, ..., {length}]"
            )
        if (np.diff(edges) <= 0).any():
            at = int(np.argmax(np.diff(edges) <= 0))
            raise UserError(
                f"cu_seqlens = {_brief(edges)}: run {at} from {edges[at]} to {edges[at + 1]} is "
                "empty or negative; every document needs at least one token, so drop it"
            )
        if len(self.segment_docs) != len(edges) - 1 or (self.segment_docs < 0).any():
            raise UserError(
                f"segment_docs = {_brief(self.segment_docs)} for {len(edges) - 1} runs: give one "
                "non-negative document id a run"
            )
        if self.boundary not in BOUNDARIES:
            raise UserError(f"boundary = {self.boundary!r}: must be 'mask' or 'train'")
        if self._loss_mask is not None and self._loss_mask.shape != (length,):
            raise UserError(
                f"loss_mask has shape {self._loss_mask.shape} for {length} tokens: give one value "
                "a token"
            )
        docs = self.segment_docs
        self._validate_copies()
        if self.mode.has_anchor and (edges[1] != 1 or (docs[1:] == docs[0]).any()):
            raise UserError(
                f"cu_seqlens = {_brief(edges)} in mode 'anchor': token 0 is the anchor and must be "
                "its own document; put the anchor token in front and start cu_seqlens with [0, 1, "
                "...], or use Window.from_documents(documents, anchor_id)"
            )

    def _validate_copies(self) -> None:
        copies = self._copies
        if copies is None:
            return
        if copies.shape != self.segment_docs.shape:
            raise UserError(
                f"copies has shape {copies.shape} for {len(self.segment_docs)} runs: give one "
                "value a run"
            )
        long = copies & (np.diff(self.cu_seqlens) > 1)
        if long.any():
            raise UserError(
                f"copies: run {int(np.argmax(long))} is a copy of the anchor and has more than one "
                "token; give the copy a run of its own, with the document's id in segment_docs"
            )
        if self.mode.has_anchor and copies.any():
            raise UserError(
                "copies of the anchor in mode 'anchor', which has one anchor for all documents: "
                "leave them out, or choose mode intra_doc"
            )


def _int_vector(name: str, values: Any) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UserError(
            f"{name} has shape {array.shape} and dtype {array.dtype}: give a vector of integers"
        )
    return _readonly(array.astype(np.int64))


def _readonly(array: np.ndarray) -> np.ndarray:
    array = array.view()
    array.setflags(write=False)
    return array


def _brief(array: np.ndarray) -> str:
    if len(array) <= 12:
        return str(array.tolist())
    return f"[{', '.join(map(str, array[:6]))}, ..., {', '.join(map(str, array[-3:]))}]"
