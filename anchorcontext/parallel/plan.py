"""The plan a model is called with: plan data bound to a process group and an engine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from anchorcontext.kernels import Engine, accumulator_dtype, get_engine
from anchorcontext.kernels.pinned import to_device

from ..errors import UserError
from ..plan import BatchPlan, CostModel, RankPlan, RingFlashAttnPlan
from ..plan.cache import PLANS
from ..window import Window
from .mesh import group_device
from .meter import Meter
from .ring_flash_attn import check_request
from .transfer import Peers


class Plan:
    """One micro-batch's plan on this rank; made once, used by every layer, forward and backward.

    Attributes:
        data: the :class:`~anchorcontext.plan.BatchPlan` of all ranks; micro-batches of the same
            documents share it.
        windows: the micro-batch.
        mine: this rank's part of it.
        peers: the ranks this one exchanges rows with, None without any.
        team: the ranks this one swaps heads with (ulysses), None without any.
        group: the SP group, None on a single device.
        overlap: whether rows travel while tiles are computed.
        meter: bytes and seconds spent so far under this plan.
    """

    def __init__(
        self,
        data: BatchPlan,
        group: dist.ProcessGroup | None = None,
        engine: str = "auto",
        *,
        overlap: bool = True,
        windows: Sequence[Window] | None = None,
    ) -> None:
        self.data = data
        self.windows = data.windows if windows is None else tuple(windows)
        self.overlap = overlap
        self.group = group
        self.sp_size = data.sp_size
        self.sp_rank = dist.get_rank(group) if group is not None else 0
        self.mine: RankPlan = data.rank(self.sp_rank)
        self.peers, self.team = _peers(data, group, self.sp_rank)
        self.meter = Meter()
        self._engine_name = engine
        self._team_orders: dict[torch.device, torch.Tensor | None] = {}
        self._engines: dict[tuple[torch.device, torch.dtype, bool], Engine] = {}

    @property
    def batch_size(self) -> int:
        """B, windows of the micro-batch."""
        return self.data.batch_size

    @property
    def length(self) -> int:
        """L, tokens of the longest window, without padding."""
        return self.data.length

    @property
    def padded_length(self) -> int:
        """Tokens of each window with padding: ``sp_size * local_length``."""
        return self.data.padded_length

    @property
    def local_length(self) -> int:
        """S, tokens of each window that this rank holds."""
        return self.data.local_length

    def engine(self, device: torch.device, dtype: torch.dtype, rotates: bool = False) -> Engine:
        """The engine that computes tiles of ``dtype`` on ``device``; ``rotates``: from queries and
        keys that come unrotated."""
        key = (device, dtype, rotates)
        if key not in self._engines:
            self._engines[key] = get_engine(
                self._engine_name,
                device=device,
                dtype=dtype,
                exact=self.data.exact,
                rotates=rotates,
            )
        return self._engines[key]

    def team_order(self, device: torch.device) -> torch.Tensor | None:
        """int64 (N,): the team's rows, window by window, numbered as its members list them; None
        where the two orders are the same."""
        if device not in self._team_orders:
            order = _team_order(self.data)
            self._team_orders[device] = None if order is None else to_device(order, device)
        return self._team_orders[device]

    def predicted_bytes(
        self,
        *,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        forwards: int = 1,
        backwards: int = 1,
    ) -> int:
        """Bytes this rank sends for a model's attention; equals what the meter counts.

        With gradient checkpointing a training step runs two forwards a layer.
        """
        return self.data.bytes_sent(
            self.sp_rank,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            element_size=dtype.itemsize,
            gradient_size=accumulator_dtype(dtype).itemsize,
            forwards=num_layers * forwards,
            backwards=num_layers * backwards,
        )

    @property
    def num_pairs(self) -> float:
        """This rank's share of the visible (query, key) pairs of all heads: with ulysses it
        computes its team's pairs for 1 / U of the heads."""
        return self.mine.num_pairs / self.data.ulysses


def make_plan(
    windows: Window | Sequence[Window],
    sp_group: dist.ProcessGroup | None = None,
    layout: str = "auto",
    exchange: str = "auto",
    *,
    ulysses: int = 1,
    engine: str = "auto",
    cost: CostModel | None = None,
    exact: bool = False,
    overlap: bool = True,
    backend: str = "native",
    verify: bool = True,
) -> Plan:
    """Plan one micro-batch for this rank.

    Args:
        windows: one window or the windows of the micro-batch; the same on every rank of the group.
        sp_group: the ranks that share the windows; None: this device alone.
        layout: ``"contiguous"``, ``"zigzag"``, ``"balanced"`` or ``"auto"``.
        exchange: ``"ring"``, ``"gather"``, ``"ulysses"``, ``"hybrid"`` or ``"auto"``.
        ulysses: ranks of a team that swap heads (:class:`~anchorcontext.plan.BatchPlan`).
        engine: the kernel engine's name, ``"auto"`` for the best one that serves the tensors.
        cost: what the layout ``balanced`` minimises; default: an 8B model on H100s.
        exact: forward has the same bits on any number of ranks, one included; rows travel by
            ``"gather"`` (:mod:`anchorcontext.plan.exact`).
        overlap: compute on one step's rows while the next step's travel; False: wait for them
            first, to see what overlapping saves (same results, bit for bit).
        backend: ``"native"``, or ``"ring_flash_attn"``: the package of that name
            (:mod:`anchorcontext.plan.ring_flash_attn`).
        verify: compare the plan's fingerprint over the group (one tiny all-gather) and raise on
            every rank when the ranks were given different windows.

    Raises:
        UserError: an unknown layout, exchange or backend, what the backend cannot express, or
            ranks that disagree.
    """
    batch = [windows] if isinstance(windows, Window) else list(windows)
    sp_size = dist.get_world_size(sp_group) if sp_group is not None else 1
    if sp_group is not None and verify and sp_size > 1:
        options = f"{layout} {exchange} {ulysses} {cost} {exact} {backend}"
        _check_agreement(batch, options, sp_group)
    data = PLANS.plan(
        batch,
        sp_size,
        backend=backend,
        layout=layout,
        exchange=exchange,
        ulysses=ulysses,
        cost=cost,
        exact=exact,
    )
    if isinstance(data, RingFlashAttnPlan):
        check_request(engine, overlap)
    group = sp_group if sp_size > 1 else None
    return Plan(data, group, engine, overlap=overlap, windows=batch)


def _peers(
    data: BatchPlan, group: dist.ProcessGroup | None, sp_rank: int
) -> tuple[Peers | None, Peers | None]:
    """The ranks that exchange rows with this one (one of each team), and this rank's team."""
    if group is None:
        return None, None
    size = data.ulysses
    first, place = sp_rank - sp_rank % size, sp_rank % size
    rows = Peers(group, tuple(range(place, data.sp_size, size))) if data.num_teams > 1 else None
    team = Peers(group, tuple(range(first, first + size))) if size > 1 else None
    return rows, team


def _team_order(data: BatchPlan) -> torch.Tensor | None:
    """See :meth:`Plan.team_order`: members hold consecutive parts of the team's rows."""
    size, batch, length = data.ulysses, data.batch_size, data.local_length
    if batch == 1 or size == 1:
        return None
    return torch.arange(size * batch * length).view(size, batch, length).transpose(0, 1).flatten()


def _check_agreement(windows: list[Window], options: str, group: dist.ProcessGroup) -> None:
    lengths = [window.num_tokens for window in windows]
    mine = torch.tensor(
        [len(lengths), max(lengths, default=0), _fingerprint(windows, options)],
        device=group_device(group),
    )
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    reports = torch.stack(everyone).tolist()  # the host reads once
    for index, what in enumerate(("windows in the micro-batch", "tokens in the longest window")):
        values = [report[index] for report in reports]
        if len(set(values)) > 1:
            raise UserError(
                f"the ranks of one SP group disagree on the {what}: {values} on ranks "
                f"0..{len(values) - 1}; all of them must be given the same windows"
            )
    prints = [report[2] for report in reports]
    if len(set(prints)) > 1:
        odd = [rank for rank, value in enumerate(prints) if value != prints[0]]
        raise UserError(
            f"SP ranks {odd} were given other windows than rank 0 (same lengths, different tokens, "
            "documents, mode, layout or exchange); all ranks of one SP group must be given the "
            "same windows and options"
        )


def _fingerprint(windows: list[Window], options: str) -> int:
    digest = hashlib.blake2b(options.encode(), digest_size=7)
    for window in windows:
        digest.update(f"{window.mode!r} {window.boundary}".encode())
        for array in (window.input_ids, window.cu_seqlens, window.segment_docs, window.labels):
            digest.update(np.ascontiguousarray(array).tobytes())
    return int.from_bytes(digest.digest(), "little")
