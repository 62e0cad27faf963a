"""The CPU engine: torch's flash attention operator for CPUs, and a kernel of ours for short tiles.

Tiles of up to 1,024 queries and keys go to :mod:`.cpu_short`, where a C compiler is at hand and
dtypes are fp32 or bf16; of exact lists the first 1,024 tokens of every document. All else is the
operator's.

The operator (``aten::_scaled_dot_product_flash_attention_for_cpu``) takes (B, H, S, D) views of any
stride, reads key heads natively under GQA, returns the LSE and never holds a score matrix. Three
of its habits shape this file:

* its causal mask is aligned top-left, ours bottom-right: a causal tile with more keys than queries
  is computed as a full rectangle and a causal square, which agree on both alignments;
* a call costs about 0.1 ms before it computes anything: small tiles of equal shape go into one call
  as a batch, which gives each of them the result of its own call, bit for bit;
* its bf16 backward adds dq, dk and dv up in bf16, so that their error grows with the square root
  of the length (dk: 0.4 % at 1K, 0.7 % at 4K), and takes from 4x (documents of 64 tokens) to 0.75x
  (8K tokens) the time of fp32: the backward always runs in fp32.
"""

from __future__ import annotations

import torch

from . import cpu_library, cpu_short
from .cpu_calls import Call, calls, exact_calls
from .interface import SoftmaxState, Tiles, accumulator_dtype
from .merge import lse_for_backward, merge_, merge_rows_

_FORWARD_OP = "_scaled_dot_product_flash_attention_for_cpu"
_BACKWARD_OP = "_scaled_dot_product_flash_attention_for_cpu_backward"
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class CpuEngine:
    """Flash attention on the CPU; see `Engine` for the two methods' contract."""

    name = "cpu"
    exact = True
    takes_anchors = False
    takes_rotation = False

    @classmethod
    def why_not(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why this engine cannot serve ``device`` and ``dtype``; None when it can."""
        if device.type != "cpu":
            return f"it runs on cpu tensors, not on {device.type}"
        if dtype not in _DTYPES:
            return f"its operator takes fp64, fp32, bf16 and fp16, not {dtype}"
        if not (hasattr(torch.ops.aten, _FORWARD_OP) and hasattr(torch.ops.aten, _BACKWARD_OP)):
            return f"torch {torch.__version__} lacks aten::{_FORWARD_OP}"
        return None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tiles: Tiles,
        scale: float,
        state: SoftmaxState,
    ) -> None:
        """Merge the tiles' attention into ``state``, in place."""
        if cpu_library.why_not(q, k, v) is None:
            short, tiles = cpu_short.split(tiles)
            if short is not None:
                cpu_short.forward(q, k, v, short, scale, state)
        made = exact_calls(tiles) if tiles.exact else calls(tiles)
        _forward_calls(q, k, v, made, scale, state)

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        tiles: Tiles,
        scale: float,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
    ) -> None:
        """Add the tiles' gradients into ``dq``, ``dk`` and ``dv``, in place."""
        if cpu_library.why_not(q, k, v, dout, out) is None:
            short, tiles = cpu_short.split(tiles)
            if short is not None:
                cpu_short.backward(dout, q, k, v, out, lse, short, scale, dq, dk, dv)
        if not len(tiles):
            return
        operator = getattr(torch.ops.aten, _BACKWARD_OP)
        dtype = accumulator_dtype(q.dtype)
        lse = lse_for_backward(lse).to(dtype)
        for call in calls(tiles):
            queries, keys = call.queries, call.keys
            grads = operator(
                queries.load(dout).to(dtype),
                queries.load(q).to(dtype),
                keys.load(k).to(dtype),
                keys.load(v).to(dtype),
                queries.load(out).to(dtype),
                queries.load(lse),
                0.0,
                call.causal,
                scale=scale,
            )
            for total, grad, rows in zip((dq, dk, dv), grads, (queries, keys, keys), strict=True):
                if rows.index is None:
                    total[rows.start : rows.stop] += rows.unload(grad)
                else:
                    total.index_add_(0, rows.index, rows.unload(grad))


def _forward_calls(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    calls: list[Call],
    scale: float,
    state: SoftmaxState,
) -> None:
    operator = getattr(torch.ops.aten, _FORWARD_OP)
    for call in calls:
        out, lse = operator(
            call.queries.load(q),
            call.keys.load(k),
            call.keys.load(v),
            0.0,
            call.causal,
            scale=scale,
        )
        queries = call.queries
        out, lse = queries.unload(out), queries.unload(lse)
        if queries.index is None:
            merge_(state, queries.start, queries.stop, out, lse)
        elif queries.held is None:
            merge_rows_(state, queries.index, out, lse)
        else:
            rows = queries.index[queries.held]
            merge_rows_(state, rows, out[queries.held], lse[queries.held])
