"""The truth that benchmarks measure errors against: attention by its definition, in fp64."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from ..testing.oracle import dense_attention

BLOCK = 256
"""Queries at a time: scores of 8 heads over 32K keys are then 0.5 GB."""


@dataclass(frozen=True)
class Exact:
    """Output and gradients of a whole window, fp64, token-major: (L, H, D)."""

    out: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def exact_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    cu_seqlens: np.ndarray,
    mode: str,
) -> Exact:
    """Forward and backward by autograd over dense scores, a block of queries at a time.

    Args:
        q, dout: (L, Hq, D); k, v: (L, Hkv, D), any float dtype.
        cu_seqlens: (n + 1,) edges of the documents.
        mode: ``full``, ``intra_doc`` or ``anchor`` (token 0 is seen by every query).
    """
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    exact = Exact(*(torch.zeros_like(x) for x in (q, q, k, v)))
    edges = [0, len(q)] if mode == "full" else cu_seqlens.tolist()
    for start, stop in pairwise(edges):
        for first in range(start, stop, BLOCK):
            last = min(first + BLOCK, stop)
            keys = torch.arange(start, last)
            if mode == "anchor" and start > 0:
                keys = torch.cat([torch.zeros(1, dtype=torch.int64), keys])
            _add_block(exact, q, k, v, dout, slice(first, last), keys)
    return exact


def _add_block(
    exact: Exact,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    queries: slice,
    keys: torch.Tensor,
) -> None:
    """Queries of one block by the keys of their document up to the block's end."""
    own_q, own_k, own_v = leaves = [
        x.transpose(0, 1).requires_grad_() for x in (q[queries], k[keys], v[keys])
    ]
    mask = keys[None, :] <= torch.arange(queries.start, queries.stop)[:, None]
    out = dense_attention(own_q, own_k, own_v, mask, q.shape[-1] ** -0.5)
    out.backward(dout[queries].transpose(0, 1))
    exact.out[queries] = out.detach().transpose(0, 1)
    dq, dk, dv = (leaf.grad.transpose(0, 1) for leaf in leaves if leaf.grad is not None)
    exact.dq[queries] = dq
    exact.dk.index_add_(0, keys, dk)
    exact.dv.index_add_(0, keys, dv)
