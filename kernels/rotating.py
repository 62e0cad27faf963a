"""Rotation for engines that cannot rotate by themselves: around their call, on copies in memory.

What it computes is what an engine that takes a `Rotation` does, up to rounding: queries and keys
are rotated in fp32 and multiplied in it. The price is an fp32 copy of q, k and v a call, and values
that meet the probabilities in fp32 where such an engine multiplies in their own dtype.
"""

from __future__ import annotations

import torch

from .anchored import (
    AnchorKeys,
    backward_with_anchors_,
    forward_with_anchors_,
    nothing_to_do,
)
from .interface import Engine, SoftmaxState, Tiles, accumulator_dtype
from .rotation import Rotation, rotate


class RotatingEngine:
    """``inner`` behind a rotation; the methods' contract is that of `Engine`.

    Args:
        inner: an engine that serves the accumulator dtype of the queries (fp32, fp64 for fp64).
    """

    takes_anchors = True
    takes_rotation = True

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.name = inner.name
        self.exact = inner.exact

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tiles: Tiles,
        scale: float,
        state: SoftmaxState,
        *,
        anchors: AnchorKeys | None = None,
        rotation: Rotation | None = None,
    ) -> None:
        """Merge the tiles' and the anchors' attention into ``state``, in place; q, k and the
        anchors' keys come unrotated."""
        assert rotation is not None, "get_engine wraps for plans that have rotations"
        if nothing_to_do(tiles, anchors):
            return
        q_turned, k_turned, v_cast, anchors = _turned(q, k, v, anchors, rotation)
        forward_with_anchors_(self.inner, q_turned, k_turned, v_cast, tiles, scale, state, anchors)

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
        *,
        anchors: AnchorKeys | None = None,
        d_anchors: torch.Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> None:
        """Add the gradients of the unrotated q, k, anchors and of v, in place."""
        assert rotation is not None, "as in forward"
        if nothing_to_do(tiles, anchors):
            return
        dtype = accumulator_dtype(q.dtype)
        q_turned, k_turned, v_cast, turned = _turned(q, k, v, anchors, rotation)
        dq_turned, dk_turned = torch.zeros_like(q_turned), torch.zeros_like(k_turned)
        d_turned = None if d_anchors is None else torch.zeros_like(d_anchors)
        backward_with_anchors_(
            self.inner, dout.to(dtype), q_turned, k_turned, v_cast, out.to(dtype), lse, tiles,
            scale, dq_turned, dk_turned, dv, turned, d_turned,
        )  # fmt: skip
        # The transpose of a rotation, also of one with a factor on its cosines and sines (YaRN).
        dq += rotate(dq_turned, rotation.q_cos, -rotation.q_sin)
        dk += rotate(dk_turned, rotation.k_cos, -rotation.k_sin)
        if d_anchors is not None:
            assert d_turned is not None
            assert rotation.anchor_cos is not None and rotation.anchor_sin is not None
            d_anchors[:, 0] += rotate(d_turned[:, 0], rotation.anchor_cos, -rotation.anchor_sin)
            d_anchors[:, 1] += d_turned[:, 1]


def _turned(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    anchors: AnchorKeys | None,
    rotation: Rotation,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AnchorKeys | None]:
    """q, k and the anchors' keys rotated, and all values, in the accumulator dtype."""
    dtype = accumulator_dtype(q.dtype)
    q_turned = rotate(q, rotation.q_cos, rotation.q_sin).to(dtype)
    k_turned = rotate(k, rotation.k_cos, rotation.k_sin).to(dtype)
    if anchors is not None:
        assert rotation.anchor_cos is not None and rotation.anchor_sin is not None
        k0, v0 = anchors.rows.unbind(1)
        k0 = rotate(k0, rotation.anchor_cos, rotation.anchor_sin).to(dtype)
        anchors = AnchorKeys(torch.stack([k0, v0.to(dtype)], dim=1), anchors.queries)
    return q_turned, k_turned, v.to(dtype), anchors
