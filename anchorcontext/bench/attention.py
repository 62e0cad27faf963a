"""Attention over one window on one device, as the kernel benchmarks compute it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from anchorcontext.kernels import (
    AnchorKeys,
    Engine,
    SoftmaxState,
    accumulator_dtype,
    backward_with_anchors_,
    forward_with_anchors_,
)

from ..parallel import Plan, make_plan
from ..plan.mixes import mix_lengths
from ..window import Window


@dataclass(frozen=True)
class Attention:
    """The plan and the rows of one window, ready for any engine."""

    plan: Plan
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    @classmethod
    def draw(
        cls,
        mode: str,
        tokens: int,
        *,
        mix: str = "slimpajama",
        heads: tuple[int, int] = (2, 1),
        head_dim: int = 64,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> Attention:
        """Random rows of a window with the document lengths of ``mix``; q, dout (N, Hq, D) and k,
        v (N, Hkv, D), drawn on ``device``: a CPU takes half a minute for 128K tokens."""
        lengths = mix_lengths(mix, tokens - 1, seed)
        window = Window.from_documents([[0] * int(n) for n in lengths], anchor_id=0, mode=mode)
        generator = torch.Generator(device).manual_seed(seed)
        rows = [
            torch.randn(tokens, count, head_dim, generator=generator, device=device).to(dtype)
            for count in (heads[0], heads[1], heads[1], heads[0])
        ]
        return cls(make_plan(window), *rows)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Attention:
        """The same rows elsewhere, rounded to ``dtype``."""
        rows = [x.to(device, dtype) for x in (self.q, self.k, self.v, self.dout)]
        return Attention(self.plan, *rows)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document."""
        (window,) = self.plan.windows
        return [int(stop - start) for start, stop in pairwise(window.cu_seqlens.tolist())]

    @property
    def flops(self) -> float:
        """Of one forward: two products of D for every visible pair and query head."""
        _, heads, head_dim = self.q.shape
        return 4.0 * head_dim * heads * self.plan.num_pairs

    @property
    def scale(self) -> float:
        """Of the dot products."""
        return self.q.shape[-1] ** -0.5

    def forward(self, engine: Engine, state: SoftmaxState | None = None) -> SoftmaxState:
        """All tiles and the anchor's column, merged into ``state``, by default an empty one."""
        state = state or SoftmaxState.empty(self.q)
        (step,) = self.plan.mine.steps
        forward_with_anchors_(
            engine, self.q, self.k, self.v, step.tiles, self.scale, state, self.anchors
        )
        return state

    def gradients(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Accumulators for dq, dk and dv, zero."""
        dtype = accumulator_dtype(self.q.dtype)
        dq, dk, dv = (
            torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (self.q, self.k, self.v)
        )
        return dq, dk, dv

    def backward(
        self,
        engine: Engine,
        out: torch.Tensor,
        lse: torch.Tensor,
        into: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, dk and dv, accumulators, from the final output (in the dtype of q) and LSE; added
        ``into``, by default zeros."""
        dq, dk, dv = into or self.gradients()
        anchors = self.anchors
        d_anchors = torch.zeros(anchors.rows.shape, dtype=dq.dtype, device=self.q.device)
        (step,) = self.plan.mine.steps
        backward_with_anchors_(
            engine, self.dout, self.q, self.k, self.v, out, lse, step.tiles, self.scale,
            dq, dk, dv, anchors, d_anchors,
        )  # fmt: skip
        for number, row in self.plan.mine.anchors.own.tolist():
            dk[row] += d_anchors[number, 0]
            dv[row] += d_anchors[number, 1]
        return dq, dk, dv

    @cached_property
    def anchors(self) -> AnchorKeys:
        """The window's anchor, if its mode has one, and the queries that see it."""
        mine = self.plan.mine.anchors
        rows = self.k.new_empty((mine.num_anchors, 2, *self.k.shape[1:]))
        for number, row in mine.own.tolist():
            rows[number, 0] = self.k[row]
            rows[number, 1] = self.v[row]
        return AnchorKeys(rows, mine.queries)


def causal_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Rows q (N, Hq, D), k and v (N, Hkv, D) as one causal sequence, by torch's own attention; on
    CUDA by flash attention wherever that takes the dtype."""
    flash = q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if flash else nullcontext():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)
