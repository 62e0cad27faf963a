"""One engine call as Triton launches: arguments, work lists on the device, the anchors' sums."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from . import triton_config
from .anchored import AnchorKeys
from .interface import SoftmaxState, Tiles
from .pinned import to_device
from .rotation import Rotation, rotate
from .triton_config import Config
from .worklist import WorkList, anchor_work, key_work, query_work

_NO_QUERIES = np.zeros((0, 3), dtype=np.int64)


class Call:
    """The launches of one engine call and what they share; arguments as for the engine.

    N query rows, M key rows, Hq and Hkv heads, D head dimension, A anchors, C chunks of rows.
    """

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tiles: Tiles,
        scale: float,
        anchors: AnchorKeys | None,
        rotation: Rotation | None,
        precision: str,
    ) -> None:
        self.q, self.k, self.v = rows(q), rows(k), rows(v)
        self.tiles, self.scale, self.rotation = tiles, scale, rotation
        self.anchors = anchors if anchors is not None and len(anchors.queries) else None
        self.num_heads, self.num_kv_heads, self.head_dim = q.shape[1], k.shape[1], q.shape[2]
        self.k0, self.v0 = self._anchor_keys()
        self.constants: dict[str, Any] = {
            "GROUP": self.num_heads // self.num_kv_heads,
            **triton_config.columns(self.head_dim, q.dtype, rotation is not None),
            "PRECISION": precision,
        }
        # Without RoPE the kernels read no table: any pointer will do.
        self.q_tables = (q, q) if rotation is None else (rotation.q_cos, rotation.q_sin)
        self.k_tables = (k, k) if rotation is None else (rotation.k_cos, rotation.k_sin)

    def forward(self, state: SoftmaxState, config: Config) -> None:
        """Merge tiles and anchors into ``state``."""
        from .triton_forward import forward_kernel

        work = self._query_work(config, exact=self.tiles.exact)
        self._launch(
            forward_kernel, self.num_heads * work.num_blocks, config,
            self.q, self.k, self.v, state.out, state.lse,
            self.k0, self.v0, self._anchor_work().row_anchor, *self.q_tables, *self.k_tables,
            *work.arrays, len(self.q), work.num_blocks, self.scale,
            *_strides(self.q, self.k, self.v, state.out), *state.lse.stride(), self.k0.stride(0),
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, ANCHOR=self.anchors is not None,
            **self.constants,
        )  # fmt: skip

    def prepare(
        self,
        dout: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        d_anchors: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """delta, lse2 and ds0, each fp32 (Hq, N); adds the anchors' gradients on the way."""
        from .triton_backward import prepare_kernel

        shape, device = (self.num_heads, len(self.q)), self.q.device
        delta, lse2 = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
        ds0 = delta if self.anchors is None else torch.empty_like(delta)
        work = self._anchor_work()
        partial = torch.empty(
            (sum(work.num_chunks), self.num_heads, 2, self.head_dim),
            dtype=torch.float32,
            device=device,
        )
        config = triton_config.prepare_config(self.head_dim)
        if device.type == "cpu":
            config = triton_config.INTERPRETER
        self._launch(
            prepare_kernel, len(work.chunks) * self.num_heads, config,
            dout, out, lse, self.q, self.k0, self.v0, *self.q_tables,
            work.chunks, delta, lse2, ds0, partial, len(self.q), self.num_heads, self.scale,
            *_strides(dout, out), *lse.stride(), *_strides(self.q), self.k0.stride(0),
            GROUP=self.constants["GROUP"], HEAD_DIM=self.head_dim,
            BLOCK_D=triton_config.block_columns(self.head_dim), HALF_D=self.head_dim // 2,
            BLOCK_HALF=triton_config.block_columns(self.head_dim // 2),
            BLOCK_M=config.block_m, ANCHOR=self.anchors is not None,
            ROPE=self.rotation is not None,
        )  # fmt: skip
        if self.anchors is not None:
            assert d_anchors is not None, "anchors need d_anchors"
            self._add_anchor_gradients(partial, work.num_chunks, d_anchors)
        return delta, lse2, ds0

    def dq(
        self,
        dout: torch.Tensor,
        delta: torch.Tensor,
        lse2: torch.Tensor,
        ds0: torch.Tensor,
        dq: torch.Tensor,
        config: Config,
    ) -> None:
        """Add the queries' gradient into ``dq``."""
        from .triton_backward import dq_kernel

        work = self._query_work(config)
        self._launch(
            dq_kernel, self.num_heads * work.num_blocks, config,
            dout, self.q, self.k, self.v, self.k0, self._anchor_work().row_anchor,
            delta, lse2, ds0, dq, *self.q_tables, *self.k_tables,
            *work.arrays, len(self.q), work.num_blocks, self.scale,
            *_strides(dout, self.q, self.k, self.v, dq), self.k0.stride(0),
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, ANCHOR=self.anchors is not None,
            **self.constants,
        )  # fmt: skip

    def dkdv(
        self,
        dout: torch.Tensor,
        delta: torch.Tensor,
        lse2: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
        config: Config,
    ) -> None:
        """Add the gradients of keys and values into ``dk`` and ``dv``."""
        from .triton_backward import dkdv_kernel

        work = self._key_work(config)
        programs = self.num_kv_heads * work.num_blocks * (1 if self.constants["RESIDENT"] else 2)
        self._launch(
            dkdv_kernel, programs, config,
            dout, self.q, self.k, self.v, delta, lse2, dk, dv, *self.q_tables, *self.k_tables,
            *work.arrays, len(self.q), len(self.k), work.num_blocks, self.scale,
            *_strides(dout, self.q, self.k, self.v, dk, dv),
            BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            **self.constants,
        )  # fmt: skip

    def _launch(
        self, kernel: Any, programs: int, config: Config, *args: Any, **consts: Any
    ) -> None:
        if programs == 0:
            return
        device = self.q.device
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            kernel[(programs,)](
                *args,
                **consts,
                num_warps=config.num_warps,
                num_stages=config.num_stages,
                enable_fp_fusion=True,  # Triton's own default is about to change
            )

    def _anchor_keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (rotated where q and k are) and values of the anchors (A, Hkv, D), contiguous."""
        if self.anchors is None:
            return self.k, self.v  # never read
        k0, v0 = self.anchors.rows.unbind(1)
        if self.rotation is not None:
            k0 = rotate(k0, *self._anchor_tables())
        return k0.contiguous(), v0.contiguous()

    def _anchor_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.rotation is not None
        cos, sin = self.rotation.anchor_cos, self.rotation.anchor_sin
        assert cos is not None and sin is not None, "a rotation of anchors needs their angles"
        return cos, sin

    def _add_anchor_gradients(
        self, partial: torch.Tensor, num_chunks: tuple[int, ...], d_anchors: torch.Tensor
    ) -> None:
        """Add the chunks' shares ``partial`` (C, Hq, 2, D), listed anchor by anchor."""
        sums = torch.stack([part.sum(0) for part in partial.split(num_chunks)])
        dk0, dv0 = sums.unflatten(1, (self.num_kv_heads, -1)).sum(2).unbind(2)
        if self.rotation is not None:
            cos, sin = self._anchor_tables()
            dk0 = rotate(dk0, cos, -sin)
        d_anchors[:, 0] += dk0
        d_anchors[:, 1] += dv0

    def _query_work(self, config: Config, exact: bool = False) -> _DeviceWork:
        num_rows = len(self.q)

        def make() -> _DeviceWork:
            anchored = np.zeros(num_rows, dtype=bool)
            for _, start, stop in self._queries.tolist():
                anchored[start:stop] = True
            blocks = config.block_m, config.block_n
            work = query_work(self.tiles, num_rows, *blocks, anchored, exact)
            return _DeviceWork.of(work, self.q.device)

        return self._cached(("queries", num_rows, config[:2], exact, id(self._queries)), make)

    def _key_work(self, config: Config) -> _DeviceWork:
        def make() -> _DeviceWork:
            work = key_work(self.tiles, len(self.k), config.block_n, config.block_m)
            return _DeviceWork.of(work, self.k.device)

        return self._cached(("keys", len(self.k), config[:2]), make)

    def _anchor_work(self) -> _DeviceAnchors:
        num_rows = len(self.q)
        num_anchors = 0 if self.anchors is None else len(self.anchors.rows)

        def make() -> _DeviceAnchors:
            work = anchor_work(self._queries, num_anchors, num_rows, triton_config.CHUNK_ROWS)
            return _DeviceAnchors(
                to_device(torch.from_numpy(work.row_anchor), self.q.device),
                to_device(torch.from_numpy(work.chunks), self.q.device),
                work.num_chunks,
                self._queries,
            )

        return self._cached(("anchors", num_rows, num_anchors, id(self._queries)), make)

    @property
    def _queries(self) -> np.ndarray:
        return _NO_QUERIES if self.anchors is None else self.anchors.queries

    def _cached(self, key: tuple, make: Callable[[], Any]) -> Any:
        """What ``make`` gives, made once per tile list and device. Keys with the id of the anchors'
        query list stay valid because `_DeviceAnchors` keeps that list alive."""
        key = ("triton", self.q.device, *key)
        if key not in self.tiles.cache:
            self.tiles.cache[key] = make()
        return self.tiles.cache[key]


@dataclass(frozen=True, eq=False)
class _DeviceWork:
    """A `WorkList` on the device: its blocks, items and limits."""

    arrays: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    num_blocks: int

    @classmethod
    def of(cls, work: WorkList, device: torch.device) -> _DeviceWork:
        blocks, items, limits = (
            to_device(torch.from_numpy(x), device) for x in (work.blocks, work.items, work.limits)
        )
        return cls((blocks, items, limits), len(work))


@dataclass(frozen=True, eq=False)
class _DeviceAnchors:
    """An `AnchorWork` on the device, with the query list it was made from."""

    row_anchor: torch.Tensor
    chunks: torch.Tensor
    num_chunks: tuple[int, ...]
    queries: np.ndarray


def rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` with a contiguous last dimension, as the kernels read it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(*tensors: torch.Tensor) -> list[int]:
    """Row and head strides of (rows, heads, D) tensors, in elements."""
    return [stride for x in tensors for stride in x.stride()[:2]]
