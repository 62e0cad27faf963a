"""One window in numbers: its documents, and what each rank holds, computes and sends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ..modes import IGNORE, MODES
from ..plan import BatchPlan, CostModel, check_heads, plan_batch
from ..window import Window
from .flops import visible_pairs

if TYPE_CHECKING:
    from ..config import Config


@dataclass(frozen=True)
class DocumentRow:
    """A run of one document's tokens in the window: ``start .. stop - 1``."""

    document: int
    """Its id in the window; a document in several runs has several rows."""
    name: str
    start: int
    stop: int
    length: int
    share: float
    """Of the window's tokens."""
    first_position: int
    last_position: int
    targets: int
    """Tokens with a label."""
    masked: int
    """Tokens that are never a target: a domain tag's, a copy of the anchor."""


@dataclass(frozen=True)
class RankRow:
    """What one rank of the SP group does for the window, per layer."""

    rank: int
    holds: tuple[tuple[int, int], ...]
    """Intervals of tokens, as ``(start, stop)``; they may reach into the padding."""
    tokens: int
    """Real ones."""
    padding: int
    tiles: int
    """With ulysses those of its team, for its share of the heads."""
    pairs: float
    """Visible (query, key) pairs it computes, the anchor's included; with ulysses its share."""
    load: float
    """Its pairs over the mean of all ranks."""
    rows_sent: int
    """Key rows sent in one forward; what ulysses swaps is no row."""
    rows_received: int
    gradient_rows_sent: int
    """Rows of key gradients returned in one backward."""
    bytes_sent: int | None
    """In one training step of the whole model on this window; None without a model."""


@dataclass(frozen=True)
class ModelTraffic:
    """What a model's attention sends for one row of the plan."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    element_size: int
    """Bytes an element of keys and values."""
    gradient_size: int
    """Bytes an element of their gradients."""
    forwards: int
    """Forward passes of attention in a step, all layers together: twice the layers with gradient
    checkpointing."""
    swaps: int | None = None
    """Those in which ulysses swaps, where they are not ``forwards``."""


@dataclass(frozen=True, eq=False)
class Inspection:
    """One window under a layout and an exchange; ``as_dict`` is its JSON form."""

    window: Window
    plan: BatchPlan
    documents: tuple[DocumentRow, ...]
    ranks: tuple[RankRow, ...]
    traffic: np.ndarray
    """int64 (P, P): key rows that rank i sends to rank j in one forward of one layer."""
    backend: str = "native"
    """Whose code moves them."""
    precision: dict[str, str] | None = None
    """The dtype of every part of attention; None without a config."""

    @property
    def anchor_token(self) -> int | None:
        """Token id of the anchor, or of its copies; None where the window has neither."""
        window = self.window
        if window.mode.has_anchor:
            return int(window.input_ids[0])
        copies = window.anchor_copies
        return None if copies is None else int(window.input_ids[copies][0])

    @property
    def controls(self) -> dict[str, Any]:
        """What is varied of the window's mode, as fields of :class:`~anchorcontext.modes.Mode`."""
        plain = asdict(MODES[self.window.mode.name])
        mode = asdict(self.window.mode)
        return {name: value for name, value in mode.items() if value != plain[name]}

    @property
    def pairs(self) -> int:
        """Visible pairs of the window."""
        return visible_pairs(self.window.mode, self.window.doc_ids)

    @property
    def density(self) -> float:
        """Visible pairs over those of full causal attention."""
        return self.pairs / (self.window.num_tokens * (self.window.num_tokens + 1) // 2)

    @property
    def balance(self) -> float:
        """The busiest rank's pairs over the mean: 1.0 is perfect."""
        return max(rank.load for rank in self.ranks)

    @property
    def rows_moved(self) -> int:
        """Key rows sent by all ranks in one forward of one layer."""
        return int(self.traffic.sum())

    @property
    def rows_unpruned(self) -> int:
        """What a ring that ships every row to every rank would send."""
        return self.plan.padded_length * (self.plan.sp_size - 1)

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        window = self.window
        return {
            "mode": window.mode.name,
            "controls": self.controls,
            "anchor_token": self.anchor_token,
            "precision": self.precision,
            "tokens": window.num_tokens,
            "targets": window.num_targets,
            "documents": [asdict(row) for row in self.documents],
            "visible_pairs": self.pairs,
            "density": self.density,
            "sp": self.plan.sp_size,
            "backend": self.backend,
            "layout": self.plan.layout,
            "exchange": self.plan.exchange_name,
            "choice": None if self.plan.choice is None else asdict(self.plan.choice),
            "padded_tokens": self.plan.padded_length,
            "ranks": [asdict(row) for row in self.ranks],
            "balance": self.balance,
            "rows_moved": self.rows_moved,
            "rows_unpruned": self.rows_unpruned,
            "traffic": self.traffic.tolist(),
        }


def inspect_window(
    window: Window,
    *,
    sp: int = 1,
    layout: str = "auto",
    exchange: str = "auto",
    ulysses: int = 1,
    exact: bool = False,
    names: Callable[[int], str] | None = None,
    model: ModelTraffic | None = None,
    cost: CostModel | None = None,
    backend: str = "native",
    precision: dict[str, str] | None = None,
) -> Inspection:
    """Look at one window as ``sp`` ranks would share it.

    Args:
        layout, exchange, ulysses, exact: as in :class:`~anchorcontext.plan.BatchPlan`.
        names: what to call run i of the window.
        model: the model whose bytes are counted; without it only rows are.
        cost: of one of its layers, as training plans with it.
        backend: whose traffic and balance.
        precision: the dtype of every part of attention (:func:`attention_precision`).

    Raises:
        UserError: an unknown layout or exchange; what the backend cannot express; heads of the
            model that the exchange cannot share.
    """
    plan = plan_batch(
        [window],
        sp,
        backend=backend,
        layout=layout,
        exchange=exchange,
        ulysses=ulysses,
        cost=cost,
        exact=exact,
    )
    if model is not None:
        check_heads(model.num_heads, model.num_kv_heads, plan.ulysses)
    mean = sum(_pairs(plan, rank) for rank in range(sp)) / sp
    traffic = _traffic(plan)
    return Inspection(
        window=window,
        plan=plan,
        documents=_documents(window, names),
        ranks=tuple(_rank_row(plan, rank, mean, traffic, model) for rank in range(sp)),
        traffic=traffic,
        backend=backend,
        precision=precision,
    )


def attention_precision(config: Config) -> dict[str, str]:
    """The dtype of every part of the configured model's attention, by its key in
    ``attention.precision``."""
    precision, own = config.attention.precision, config.model.dtype
    given = {part: own if d == "model" else d for part, d in precision.model_dump().items()}
    if precision.engine_rotates:
        given |= dict.fromkeys(("rotation", "qk"), "fp32 in the engine")
    return given


def _documents(window: Window, names: Callable[[int], str] | None) -> tuple[DocumentRow, ...]:
    edges = window.cu_seqlens.tolist()
    positions, has_target = window.position_ids, window.labels != IGNORE
    targets = np.add.reduceat(has_target.astype(np.int64), edges[:-1]).tolist()
    masked = np.add.reduceat((~window.loss_mask).astype(np.int64), edges[:-1]).tolist()
    rows = []
    for run, (start, stop) in enumerate(pairwise(edges)):
        name = names(run) if names is not None else ""
        if not name and run == 0 and window.mode.has_anchor:
            name = "anchor"
        rows.append(
            DocumentRow(
                document=int(window.segment_docs[run]),
                name=name,
                start=start,
                stop=stop,
                length=stop - start,
                share=(stop - start) / window.num_tokens,
                first_position=int(positions[start]),
                last_position=int(positions[stop - 1]),
                targets=targets[run],
                masked=masked[run],
            )
        )
    return tuple(rows)


def _rank_row(
    plan: BatchPlan, rank: int, mean_pairs: float, traffic: np.ndarray, model: ModelTraffic | None
) -> RankRow:
    mine, pairs = plan.rank(rank), _pairs(plan, rank)
    holds = [(start, stop) for start, stop, owner in plan.runs[0].tolist() if owner == rank]
    tokens = sum(max(0, min(stop, plan.length) - start) for start, stop in holds)
    bytes_sent = None
    if model is not None:
        bytes_sent = plan.bytes_sent(
            rank,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            element_size=model.element_size,
            gradient_size=model.gradient_size,
            forwards=model.forwards,
            backwards=model.num_layers,
            swaps=model.swaps,
        )
    return RankRow(
        rank=rank,
        holds=tuple(holds),
        tokens=tokens,
        padding=plan.local_length - tokens,
        tiles=sum(len(step.tiles) for step in mine.steps),
        pairs=pairs,
        load=pairs / mean_pairs if mean_pairs else 1.0,
        rows_sent=int(traffic[rank].sum()),
        rows_received=int(traffic[:, rank].sum()),
        gradient_rows_sent=mine.return_rows_sent,
        bytes_sent=bytes_sent,
    )


def _pairs(plan: BatchPlan, rank: int) -> float:
    pairs = plan.rank(rank).num_pairs
    return pairs if plan.ulysses == 1 else pairs / plan.ulysses


def _traffic(plan: BatchPlan) -> np.ndarray:
    moved = np.zeros((plan.sp_size, plan.sp_size), dtype=np.int64)
    for rank in range(plan.sp_size):
        mine = plan.rank(rank)
        transfers = [*(step.incoming for step in mine.steps), mine.anchors.broadcast]
        for transfer in transfers:
            for message in transfer.sends:
                # A team's message goes to the member in the same place of the other team.
                peer = message.peer * plan.ulysses + rank % plan.ulysses
                moved[rank, peer] += message.rows.num_rows
    return moved
