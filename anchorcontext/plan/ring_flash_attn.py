"""The plan of a micro-batch for the package ring-flash-attn 0.1.8: its sharding and its traffic.

The package has one function for each way that tokens may lie:

==================  =====================================  ==========================  ==========
function            tokens of rank r                       how keys travel             modes
==================  =====================================  ==========================  ==========
zigzag_ring         chunks r and 2P-1-r of 2P              ring                        full
zigzag_ring_varlen  these chunks of *every document*       ring                        intra_doc
ring                the r-th of P chunks                   ring                        full
llama3_varlen       the r-th of P chunks                   all-gather, head by head    both
==================  =====================================  ==========================  ==========

(``intra_doc`` stands for ``intra_doc_reset`` too: attention is the same.) Nothing is pruned. With
n = B S rows a rank and k = Hkv D, a rank sends in one layer

* ring: ``2 k n (P-1) e`` bytes forward; backward the same again, and P hops of fp32 gradients,
  ``2 k n P 4``;
* llama3: ``2 k n (P-1) e`` forward; backward the same again, and as much for the gradients, which
  a reduce-scatter adds in their own dtype. That is what bandwidth-optimal collectives move;
  gloo's reduce-scatter is an all-reduce and moves twice as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import UserError
from ..window import Window
from .anchors import plan_anchors
from .baselines import document_zigzag
from .batch import BatchPlan
from .cost import CostModel
from .steps import Message, RankPlan, Rows, Step, Transfer
from .tiling import make_tiles, owned

BACKEND = "ring_flash_attn"
INSTEAD = "use attention.backend native"


@dataclass(frozen=True)
class Algorithm:
    """One function of the package."""

    name: str
    layout: str
    exchange: str
    dtypes: tuple[str, ...]
    """What it computes rightly, of the dtypes that flash-attn's functions take."""


# The zigzag functions keep their sums in the very buffers that flash-attn overwrites when q is fp32
# (``buffer.to(torch.float32)`` copies nothing then); the ring returns dq in bf16 whatever q is.
ZIGZAG_RING = Algorithm("zigzag_ring", "zigzag", "ring", ("bfloat16", "float16"))
ZIGZAG_RING_VARLEN = Algorithm("zigzag_ring_varlen", "zigzag", "ring", ("bfloat16", "float16"))
RING = Algorithm("ring", "contiguous", "ring", ("bfloat16",))
LLAMA3_VARLEN = Algorithm(
    "llama3_varlen", "contiguous", "gather", ("bfloat16", "float16", "float32", "float64")
)


class RingFlashAttnPlan(BatchPlan):
    """A micro-batch as ring-flash-attn shares it; see :class:`~anchorcontext.plan.BatchPlan`.

    Its steps are the package's own: who sends which rows to whom in every step of its rings and
    gathers, so whatever reads a plan (traffic, bytes, balance) reads those of the package.

    Args:
        windows: all ``full``, or all ``intra_doc`` or ``intra_doc_reset``.
        sp_size: P >= 2.
        layout: ``"zigzag"``, ``"contiguous"`` or ``"auto"``.
        exchange: ``"ring"``, ``"gather"`` or ``"auto"``.
        ulysses, exact: must be 1 and False.
        cost: not used; nothing is optimised.

    Raises:
        UserError: what the package cannot express, by name.
    """

    def __init__(
        self,
        windows: Sequence[Window],
        sp_size: int,
        layout: str = "auto",
        exchange: str = "auto",
        ulysses: int = 1,
        cost: CostModel | None = None,
        exact: bool = False,
    ) -> None:
        _check_options(windows, sp_size, layout, exchange, ulysses, exact)
        same_document = windows[0].mode.same_document
        self.algorithm = choose_algorithm(same_document, layout, exchange)
        super().__init__(windows, sp_size, self.algorithm.layout, self.algorithm.exchange)
        self.cache: dict[Any, Any] = {}
        """What the executor derives from the plan."""
        if same_document:
            for number, window in enumerate(self.windows):
                self._check_documents(number, window)

    def _lay_out(self, layout: str, ulysses: int, cost: CostModel | None) -> None:
        super()._lay_out(layout, ulysses, cost)
        if self.algorithm is ZIGZAG_RING_VARLEN:
            self.layouts = ("document_zigzag",) * self.batch_size
            self.runs = self.team_runs = tuple(
                document_zigzag(window, self.padded_length, self.sp_size) for window in self.windows
            )

    def sequence_edges(self, window: int) -> np.ndarray:
        """int64 (n + 1,): where the sequences of a padded window that attend to themselves begin
        and end; padding is the last of them."""
        whole = self.windows[window]
        edges = _document_edges(whole) if whole.mode.same_document else [0, whole.num_tokens]
        return np.unique([*edges, self.padded_length])

    def padding(self, rank: int) -> np.ndarray:
        """bool (B, S): which of the rank's rows are padding."""
        return np.stack(
            [
                self.local_indices(rank, index) >= window.num_tokens
                for index, window in enumerate(self.windows)
            ]
        )

    def rank(self, rank: int) -> RankPlan:
        """What ``rank`` does in the package's functions."""
        if rank not in self._ranks:
            num_rows = self.batch_size * self.local_length
            make_steps = self._ring_steps if self.exchange == "ring" else self._gather_steps
            anchors = plan_anchors(self.pieces, self.windows, self.sp_size, rank)
            self._ranks[rank] = RankPlan(
                rank, self.sp_size, num_rows, make_steps(rank, num_rows), anchors
            )
        return self._ranks[rank]

    def bytes_sent(
        self,
        rank: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        element_size: int,
        gradient_size: int = 4,
        forwards: int = 1,
        backwards: int = 1,
        swaps: int | None = None,
    ) -> int:
        """Bytes ``rank`` sends; the gradients' own size decides, not ``gradient_size``."""
        return super().bytes_sent(
            rank,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            element_size=element_size,
            gradient_size=self.gradient_size(element_size),
            forwards=forwards,
            backwards=backwards,
            swaps=swaps,
        )

    def gradient_size(self, element_size: int) -> int:
        """Bytes of an element of the key gradients that travel."""
        return 4 if self.exchange == "ring" else element_size

    def _ring_steps(self, rank: int, num_rows: int) -> tuple[Step, ...]:
        """All rows to the next rank, P - 1 times; gradients follow P times, and are home."""
        everything = Rows(np.array([[0, num_rows]]))
        hop = Transfer(
            sends=(Message((rank + 1) % self.sp_size, everything),),
            receives=(Message((rank - 1) % self.sp_size, everything),),
        )
        pieces, mine = self.pieces, owned(self.pieces, rank)
        steps = []
        for step in range(self.sp_size):
            held = owned(pieces, (rank - step) % self.sp_size)
            tiles = make_tiles(pieces, mine, held, pieces.row[held])
            steps.append(Step(num_rows, tiles, hop if step else Transfer(), hop))
        return tuple(steps)

    def _gather_steps(self, rank: int, num_rows: int) -> tuple[Step, ...]:
        """All rows of all ranks at once, and their gradients back."""
        pieces, mine = self.pieces, owned(self.pieces, rank)
        peers = [peer for peer in range(self.sp_size) if peer != rank]
        everything = Rows(np.array([[0, num_rows]]))
        places = [Rows(np.array([[i, i + 1]]) * num_rows) for i in range(len(peers))]
        sends = tuple(Message(peer, everything) for peer in peers)
        receives = tuple(Message(peer, rows) for peer, rows in zip(peers, places, strict=True))
        foreign = np.concatenate([owned(pieces, peer) for peer in peers])
        block = pieces.owner[foreign] - (pieces.owner[foreign] > rank)
        buffer_row = block * num_rows + pieces.row[foreign]
        own = Step(num_rows, make_tiles(pieces, mine, mine, pieces.row[mine]))
        gathered = Step(
            num_rows=num_rows * len(peers),
            tiles=make_tiles(pieces, mine, foreign, buffer_row),
            incoming=Transfer(sends, receives),
            returns=Transfer(receives, sends),
        )
        return (own, gathered)

    def _check_documents(self, number: int, window: Window) -> None:
        edges = _document_edges(window)
        if len(edges) - 1 != len(np.unique(window.segment_docs)):
            raise UserError(
                f"window {number} has documents in several runs (interleaved): attention.backend "
                f"{BACKEND} takes documents that are one run of tokens; {INSTEAD}"
            )
        if self.algorithm is not ZIGZAG_RING_VARLEN:
            return
        chunks = 2 * self.sp_size
        odd = np.flatnonzero(np.diff(edges) % chunks)
        if len(odd):
            raise UserError(
                f"document {odd[0]} of window {number} has {np.diff(edges)[odd[0]]} tokens: "
                f"ring-flash-attn's zigzag cuts every document into 2 sp = {chunks} equal chunks; "
                "use attention.layout contiguous (its llama3 function takes any length), or "
                "attention.backend native"
            )


def choose_algorithm(same_document: bool, layout: str, exchange: str) -> Algorithm:
    """The function that serves a layout and an exchange.

    ``auto`` is zigzag_ring in mode full and llama3_varlen, which takes documents of any length,
    in intra_doc.

    Args:
        same_document: whether queries see their own document only.
        layout: ``"zigzag"``, ``"contiguous"`` or ``"auto"``.
        exchange: ``"ring"``, ``"gather"`` or ``"auto"``.

    Raises:
        UserError: the package has none.
    """
    ring = (ZIGZAG_RING_VARLEN,) if same_document else (ZIGZAG_RING, RING)
    candidates = (LLAMA3_VARLEN, *ring) if same_document else (ZIGZAG_RING, LLAMA3_VARLEN, RING)
    for algorithm in candidates:
        if layout in ("auto", algorithm.layout) and exchange in ("auto", algorithm.exchange):
            return algorithm
    mode = "intra_doc" if same_document else "full"
    ways = " or ".join(f"layout {a.layout} with exchange {a.exchange}" for a in candidates)
    raise UserError(
        f"layout {layout!r} with exchange {exchange!r}: in mode {mode} attention.backend {BACKEND} "
        f"has {ways}; choose one of them, or auto"
    )


def _check_options(
    windows: Sequence[Window],
    sp_size: int,
    layout: str,
    exchange: str,
    ulysses: int,
    exact: bool,
) -> None:
    """Refuse by name what the package does not have."""
    if not windows:
        raise UserError("windows is empty: a micro-batch holds at least one window")
    problem = None
    modes = sorted({window.mode.name for window in windows})
    if sp_size < 2:
        problem = f"sp = {sp_size}: {{}} works among at least two ranks"
    elif any(window.mode.anchor for window in windows):
        problem = "mode 'anchor': {} has no key that all documents see; it has full and intra_doc"
    elif len({window.mode.same_document for window in windows}) > 1:
        problem = f"modes {', '.join(modes)} in one micro-batch: {{}} takes one of them at a time"
    elif layout not in ("auto", "contiguous", "zigzag"):
        problem = f"layout {layout!r}: {{}} has contiguous and zigzag, or choose auto"
    elif exchange not in ("auto", "ring", "gather"):
        problem = f"exchange {exchange!r}: {{}} has ring and gather, or choose auto"
    elif ulysses != 1:
        problem = f"ulysses = {ulysses}: {{}} does not swap heads; leave it out"
    elif exact:
        problem = "exact: {} merges keys in the order of its ranks, so every sp rounds differently"
    if problem is not None:
        raise UserError(f"{problem.format(f'attention.backend {BACKEND}')}; or {INSTEAD}")


def _document_edges(window: Window) -> np.ndarray:
    """int64 (n + 1,): the runs of a window, neighbours of one document joined."""
    new = np.r_[True, window.segment_docs[1:] != window.segment_docs[:-1], True]
    return window.cu_seqlens[new]
