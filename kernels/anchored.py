"""Tiles and anchors in one call: engines that take the anchor along, and all the others.

An engine whose class sets ``takes_anchors`` accepts two more keyword arguments, ``anchors`` in
``forward`` and ``anchors`` with ``d_anchors`` in ``backward``, and computes the anchors' column in
the launch that computes the tiles. Every other engine gets the rank-1 correction of :mod:`.merge`
after its tiles; the result is the same. An engine whose class sets ``takes_rotation`` accepts
``rotation`` in both; :mod:`.rotating` makes one of any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .interface import Engine, SoftmaxState, Tiles
from .merge import anchor_backward_, anchor_forward_
from .rotation import Rotation


@dataclass(frozen=True, eq=False)
class AnchorKeys:
    """Anchors and the query rows that see them.

    Attributes:
        rows: (A, 2, Hkv, D) key and value of every anchor, dtype and device of k.
        queries: int64 (m, 3) ``anchor, q_start, q_stop``: query rows that see the anchor and whose
            tiles do not hold it; disjoint.
    """

    rows: torch.Tensor
    queries: np.ndarray


def nothing_to_do(tiles: Tiles, anchors: AnchorKeys | None) -> bool:
    """Whether a call shows no query a key."""
    return not len(tiles) and (anchors is None or not len(anchors.queries))


def forward_with_anchors_(
    engine: Engine,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tiles: Tiles,
    scale: float,
    state: SoftmaxState,
    anchors: AnchorKeys | None,
    rotation: Rotation | None = None,
) -> None:
    """Merge the tiles' and the anchors' attention into ``state``, in place.

    Arguments as for `Engine.forward`; ``tiles`` may be empty. With ``rotation``, which the engine
    must take, q, k and the anchors' keys come unrotated.
    """
    more = _rotation_argument(engine, rotation)
    if anchors is not None and engine.takes_anchors:
        more["anchors"] = anchors
        engine.forward(q, k, v, tiles, scale, state, **more)
        return
    if len(tiles):
        engine.forward(q, k, v, tiles, scale, state, **more)
    if anchors is None:
        return
    assert rotation is None, "an engine that rotates takes the anchors, too"
    for number, start, stop in anchors.queries.tolist():
        k0, v0 = anchors.rows[number]
        anchor_forward_(state, q, k0, v0, scale, start, stop)


def backward_with_anchors_(
    engine: Engine,
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
    anchors: AnchorKeys | None,
    d_anchors: torch.Tensor | None,
    rotation: Rotation | None = None,
) -> None:
    """Add the tiles' gradients into ``dq``, ``dk``, ``dv``; anchors' into ``dq``, ``d_anchors``.

    Arguments as for `Engine.backward`; ``tiles`` may be empty. ``d_anchors`` (A, 2, Hkv, D) is an
    accumulator like the other three. With ``rotation`` all gradients are those of the unrotated
    tensors.
    """
    arguments = (dout, q, k, v, out, lse, tiles, scale, dq, dk, dv)
    more = _rotation_argument(engine, rotation)
    if anchors is not None and engine.takes_anchors:
        more |= {"anchors": anchors, "d_anchors": d_anchors}
        engine.backward(*arguments, **more)
        return
    if len(tiles):
        engine.backward(*arguments, **more)
    if anchors is None:
        return
    assert rotation is None, "an engine that rotates takes the anchors, too"
    assert d_anchors is not None, "anchors have gradients"
    for number, start, stop in anchors.queries.tolist():
        (k0, v0), (dk0, dv0) = anchors.rows[number], d_anchors[number]
        anchor_backward_(dout, q, k0, v0, out, lse, scale, start, stop, dq, dk0, dv0)


def _rotation_argument(engine: Engine, rotation: Rotation | None) -> dict[str, Any]:
    if rotation is None:
        return {}
    assert engine.takes_rotation, f"{engine.name} cannot rotate; wrap it in a RotatingEngine"
    return {"rotation": rotation}
