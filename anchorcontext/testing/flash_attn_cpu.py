"""The part of ``flash_attn`` that ring-flash-attn calls, on CPU tensors; for tests and benchmarks.

ring-flash-attn is Python over four functions of ``flash_attn.flash_attn_interface``, which exist
only as CUDA code. :func:`install_flash_attn_cpu` registers a module of that name whose functions
run on our ``cpu`` engine, so that the real, unmodified package runs on gloo ranks::

    install_flash_attn_cpu()
    zigzag = load_submodule("zigzag_ring_flash_attn")  # anchorcontext.parallel.ring_flash_attn
    out = zigzag.zigzag_ring_flash_attn_func(q, k, v, causal=True, group=group)

The contracts are those of flash-attn 2.7 and 2.8, checked against a dense oracle:

* a batch is q (B, Sq, Hq, D) with k, v (B, Sk, Hkv, D) and an LSE of (B, Hq, Sq); sequences packed
  end to end are q (N, Hq, D) with k, v (M, Hkv, D), int32 ``cu_seqlens`` (n + 1,) and an LSE of
  (Hq, N); query head h reads key head ``h // (Hq / Hkv)``;
* the LSE is fp32, as is everything inside (fp64 for fp64 tensors, which flash-attn does not take);
  the output and the gradients have the dtype of q;
* ``causal`` is aligned bottom-right: query i of Sq sees keys j of Sk with ``j <= i + Sk - Sq``;
* a query that sees no key has output 0, LSE ``+inf`` and zero gradients;
* backward overwrites ``dq``, ``dk`` and ``dv``, views of any stride, and takes the *merged* output
  and LSE of all blocks, as ring attention hands them in.

Dropout, softcap, ALiBi, sliding windows and paged keys raise ``NotImplementedError``.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import math
import sys
import types
from functools import lru_cache

import numpy as np
import torch

from anchorcontext.kernels import SoftmaxState, Tiles, accumulator_dtype, get_engine

from ..errors import UserError

VERSION = "2.8.3"
"""The flash-attn release whose signatures these are."""


def install_flash_attn_cpu() -> types.ModuleType:
    """Register ``flash_attn`` in this process; returns the module. Twice is the same as once.

    The module's ``device_type`` is ``"cpu"``: the backend asks for it.

    Raises:
        UserError: a real flash-attn is installed or imported; it is never replaced.
    """
    known = sys.modules.get("flash_attn")
    if known is not None and getattr(known, "device_type", None) == "cpu":
        return known
    if known is not None or importlib.util.find_spec("flash_attn") is not None:
        raise UserError(
            "flash_attn is installed: its functions are never replaced by those for CPU tensors; "
            "run this test or benchmark in an environment without it"
        )
    package, interface = _module("flash_attn"), _module("flash_attn.flash_attn_interface")
    package.__path__ = []
    package.__dict__.update(__version__=VERSION, device_type="cpu", flash_attn_interface=interface)
    for function in (
        _flash_attn_forward,
        _flash_attn_backward,
        _flash_attn_varlen_forward,
        _flash_attn_varlen_backward,
    ):
        setattr(interface, function.__name__, function)
    sys.modules[package.__name__], sys.modules[interface.__name__] = package, interface
    return package


def _module(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    # transformers and others look for optional packages by their spec.
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
    return module


# The package reads the parameters' names and defaults, so both are flash-attn's, used or not.


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A batch -> output (B, Sq, Hq, D), LSE (B, Hq, Sq), an empty tensor, random state."""
    _refuse(dropout_p, (window_size_left, window_size_right), softcap, alibi_slopes)
    batch, length = q.shape[:2]
    tiles = _batch_tiles(batch, length, k.shape[1], causal)
    out, lse = _forward(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), tiles, softmax_scale)
    lse = lse.unflatten(0, (batch, length)).transpose(1, 2).contiguous()
    return out.view(q.shape), lse, q.new_empty(0), _no_random_state()


def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
    block_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed sequences -> output (N, Hq, D), LSE (Hq, N), an empty tensor, random state."""
    _refuse(dropout_p, (window_size_left, window_size_right), softcap, alibi_slopes)
    if not (block_table is leftpad_k is seqused_k is None):
        raise NotImplementedError("flash_attn on CPU tensors has no paged or padded keys")
    tiles = _varlen_tiles(cu_seqlens_q, cu_seqlens_k, causal)
    out, lse = _forward(q, k, v, tiles, softmax_scale)
    return out, lse.t().contiguous(), q.new_empty(0), _no_random_state()


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """Fill dq (B, Sq, Hq, D), dk and dv (B, Sk, Hkv, D); the row sums of dO * O are not made."""
    _refuse(dropout_p, (window_size_left, window_size_right), softcap, alibi_slopes)
    batch, length = q.shape[:2]
    dout, q_rows, k_rows, v_rows, out = (x.flatten(0, 1) for x in (dout, q, k, v, out))
    lse = softmax_lse.transpose(1, 2).flatten(0, 1)
    tiles = _batch_tiles(batch, length, k.shape[1], causal)
    _backward(dout, q_rows, k_rows, v_rows, out, lse, tiles, softmax_scale, (dq, dk, dv))
    return softmax_lse.new_empty(0)


def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """Fill dq (N, Hq, D), dk and dv (M, Hkv, D); the row sums of dO * O are not made."""
    _refuse(dropout_p, (window_size_left, window_size_right), softcap, alibi_slopes)
    tiles = _varlen_tiles(cu_seqlens_q, cu_seqlens_k, causal)
    _backward(dout, q, k, v, out, softmax_lse.t(), tiles, softmax_scale, (dq, dk, dv))
    return softmax_lse.new_empty(0)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: Tiles, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q (N, Hq, D), k and v (M, Hkv, D) -> output (N, Hq, D) in q's dtype, LSE (N, Hq)."""
    state = SoftmaxState.empty(q)
    engine = get_engine("cpu", device=q.device, dtype=q.dtype)
    engine.forward(q, k, v, tiles, scale, state)
    lse = state.lse.masked_fill_(state.lse == -math.inf, math.inf)
    return state.out.to(q.dtype), lse


def _backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    tiles: Tiles,
    scale: float,
    buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Overwrite ``buffers`` (dq, dk, dv) with the gradients of the packed rows."""
    dtype = accumulator_dtype(q.dtype)
    sums = [torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v)]
    engine = get_engine("cpu", device=q.device, dtype=q.dtype)
    engine.backward(dout, q, k, v, out, lse, tiles, scale, *sums)
    for buffer, total in zip(buffers, sums, strict=True):
        buffer.copy_(total.view(buffer.shape))


def _batch_tiles(batch: int, num_queries: int, num_keys: int, causal: bool) -> Tiles:
    edges = range(batch + 1)
    return _tiles(tuple(i * num_queries for i in edges), tuple(i * num_keys for i in edges), causal)


def _varlen_tiles(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, causal: bool) -> Tiles:
    if not cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32:
        raise TypeError(f"cu_seqlens are int32, not {cu_seqlens_q.dtype}, {cu_seqlens_k.dtype}")
    return _tiles(tuple(cu_seqlens_q.tolist()), tuple(cu_seqlens_k.tolist()), causal)


@lru_cache(maxsize=256)  # ring attention asks for the same few lists in every layer
def _tiles(cu_seqlens_q: tuple[int, ...], cu_seqlens_k: tuple[int, ...], causal: bool) -> Tiles:
    """One tile a sequence: its queries that see a key, by its keys."""
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise ValueError(f"{len(cu_seqlens_q)} query and {len(cu_seqlens_k)} key edges differ")
    q_edges, k_edges = np.array(cu_seqlens_q), np.array(cu_seqlens_k)
    num_queries, num_keys = np.diff(q_edges), np.diff(k_edges)
    # Bottom-right: the first queries of a sequence with more queries than keys see none.
    blind = np.maximum(num_queries - num_keys, 0) if causal else np.zeros_like(num_queries)
    blind[num_keys == 0] = num_queries[num_keys == 0]
    columns = (
        q_edges[:-1] + blind,
        q_edges[1:],
        k_edges[:-1],
        k_edges[1:],
        np.full(len(blind), causal),
    )
    return Tiles(np.stack(columns, axis=1)[blind < num_queries])


def _refuse(
    dropout_p: float,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
) -> None:
    if dropout_p or softcap or alibi_slopes is not None or window_size not in ((-1, -1), (-1, 0)):
        raise NotImplementedError(
            f"flash_attn on CPU tensors: dropout_p={dropout_p}, softcap={softcap}, alibi_slopes, "
            f"window_size={window_size}; only attention without them is there"
        )


def _no_random_state() -> torch.Tensor:
    return torch.empty(2, dtype=torch.int64)
