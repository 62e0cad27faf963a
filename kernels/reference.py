"""The dense engine: softmax attention written out, tile by tile, on any device and in any dtype.

Scores of a whole tile are held at once (Hq x queries x keys), so it is for short windows, for fp64
and for checking the other engines, not for speed.

Legend: q query rows, m key rows, k key/value heads, g query heads per key head, d head dimension.
"""

from __future__ import annotations

import math

import torch

from .interface import SoftmaxState, Tiles, accumulator_dtype
from .merge import lse_for_backward, merge_


class ReferenceEngine:
    """Dense attention over a tile list; see `Engine` for the two methods' contract."""

    name = "reference"
    exact = False
    takes_anchors = False
    takes_rotation = False

    @classmethod
    def why_not(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why this engine cannot serve ``device`` and ``dtype``; None when it can."""
        return None if dtype.is_floating_point else f"{dtype} is not a floating-point dtype"

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
        for q_start, q_stop, k_start, k_stop, causal in tiles.array.tolist():
            q_tile = _grouped(q[q_start:q_stop], k.shape[1])
            k_tile, v_tile = _accumulate(k[k_start:k_stop]), _accumulate(v[k_start:k_stop])
            scores = _scores(q_tile, k_tile, scale, causal)
            lse = torch.logsumexp(scores, dim=-1)
            probs = torch.exp(scores - lse.unsqueeze(-1))
            out = torch.einsum("kgqm,mkd->qkgd", probs, v_tile)
            merge_(state, q_start, q_stop, out.flatten(1, 2), lse.flatten(0, 1).T)

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
        """Add the tiles' gradients into ``dq``, ``dk`` and ``dv``, in place.

        With P = exp(S - lse) from the merged lse: dV = P' dO, dP = dO V', and for all tiles of a
        row together dS = P * (dP - rowsum(dO * out)), dQ = scale dS K, dK = scale dS' Q.
        """
        num_kv_heads = k.shape[1]
        for q_start, q_stop, k_start, k_stop, causal in tiles.array.tolist():
            rows, keys = slice(q_start, q_stop), slice(k_start, k_stop)
            q_tile, dout_tile, out_tile = (_grouped(x[rows], num_kv_heads) for x in (q, dout, out))
            k_tile, v_tile = _accumulate(k[keys]), _accumulate(v[keys])
            scores = _scores(q_tile, k_tile, scale, causal)
            lse_tile = lse_for_backward(lse[rows]).T.unflatten(0, (num_kv_heads, -1))
            probs = torch.exp(scores - lse_tile.unsqueeze(-1))
            dprobs = torch.einsum("qkgd,mkd->kgqm", dout_tile, v_tile)
            delta = (dout_tile * out_tile).sum(-1).permute(1, 2, 0)
            dscores = probs * (dprobs - delta.unsqueeze(-1)) * scale
            dq[rows] += torch.einsum("kgqm,mkd->qkgd", dscores, k_tile).flatten(1, 2)
            dk[keys] += torch.einsum("kgqm,qkgd->mkd", dscores, q_tile)
            dv[keys] += torch.einsum("kgqm,qkgd->mkd", probs, dout_tile)


def _scores(q_tile: torch.Tensor, k_tile: torch.Tensor, scale: float, causal: int) -> torch.Tensor:
    """Scaled scores (k, g, q, m), -inf where a causal tile (aligned bottom-right) hides the key."""
    scores = torch.einsum("qkgd,mkd->kgqm", q_tile, k_tile) * scale
    if causal:
        num_queries, num_keys = scores.shape[-2:]
        visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=scores.device)
        scores.masked_fill_(~visible.tril(num_keys - num_queries), -math.inf)
    return scores


def _accumulate(x: torch.Tensor) -> torch.Tensor:
    return x.to(accumulator_dtype(x.dtype))


def _grouped(x: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """(q, Hq, d) as (q, k, g, d) in the accumulator dtype."""
    return _accumulate(x).unflatten(1, (num_kv_heads, -1))
