"""flash_attn's functions on CPU tensors: each against softmax attention written out in fp64."""

from __future__ import annotations

import math
import subprocess
import sys
import types
from itertools import pairwise

import pytest
import torch

from anchorcontext.errors import UserError
from anchorcontext.testing import flash_attn_cpu as flash
from anchorcontext.testing.flash_attn_cpu import install_flash_attn_cpu

HEADS = [(4, 4), (4, 2), (9, 3), (4, 1)]
SCALE, DIM = 0.3, 16


def dense(q, k, v, dout, causal):
    """One sequence in fp64: out (Sq, Hq, D), LSE (Hq, Sq) and gradients, by autograd."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * SCALE
    if causal:
        row, column = torch.arange(len(q))[:, None], torch.arange(len(k))
        scores = scores.masked_fill(column > row + len(k) - len(q), -math.inf)
    lse = scores.logsumexp(-1)
    empty = lse == -math.inf
    probs = torch.exp(scores - lse.masked_fill(empty, 0).unsqueeze(-1))
    out = torch.einsum("hqk,khd->qhd", probs, values)
    out.backward(dout.double())
    return out.detach(), lse.detach().masked_fill(empty, math.inf), q.grad, k.grad, v.grad


def tensors(num_queries, num_keys, heads, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    (num_heads, num_kv_heads) = heads
    sizes = [(num_queries, num_heads), *[(num_keys, num_kv_heads)] * 2, (num_queries, num_heads)]
    return [
        torch.randn(*size, DIM, dtype=torch.float64, generator=generator).to(dtype)
        for size in sizes
    ]


def filled_with_nan(*like):
    """Gradient buffers that show whatever backward does not write."""
    return [torch.full_like(x, math.nan) for x in like]


def close(got, want, tolerance=1e-12):
    infinite = want == math.inf
    assert ((got == math.inf) == infinite).all()
    error = (got.double() - want).masked_fill(infinite, 0).abs().max()
    assert error <= tolerance * max(1.0, want.masked_fill(infinite, 0).abs().max()), error


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(33, 33), (7, 40), (40, 7), (1, 300)])
def test_a_batch_is_attended_to_with_the_mask_aligned_bottom_right(
    num_queries, num_keys, causal, heads
):
    batch = 2
    q, k, v, dout = tensors(batch * num_queries, batch * num_keys, heads)
    q, dout = (x.unflatten(0, (batch, num_queries)) for x in (q, dout))
    k, v = (x.unflatten(0, (batch, num_keys)) for x in (k, v))
    out, lse, _, _ = flash._flash_attn_forward(
        q, k, v, 0.0, SCALE, causal, -1, -1, 0.0, None, False
    )
    assert out.shape == q.shape and lse.shape == (batch, heads[0], num_queries)
    dq, dk, dv = filled_with_nan(q, k, v)
    flash._flash_attn_backward(
        dout, q, k, v, out, lse, dq, dk, dv, 0.0, SCALE, causal, -1, -1, 0.0, None, False
    )
    for i in range(batch):
        want = dense(q[i], k[i], v[i], dout[i], causal)
        for got, expected in zip((out, lse, dq, dk, dv), want, strict=True):
            close(got[i], expected)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_do_not_see_each_other(causal, heads):
    q_edges, k_edges = [0, 5, 6, 306, 310, 310], [0, 5, 46, 346, 348, 350]
    q, k, v, dout = tensors(q_edges[-1], k_edges[-1], heads)
    cu_q, cu_k = (torch.tensor(edges, dtype=torch.int32) for edges in (q_edges, k_edges))
    out, lse, _, _ = flash._flash_attn_varlen_forward(
        q, k, v, cu_q, cu_k, 300, 300, 0.0, SCALE, causal
    )
    assert out.shape == q.shape and lse.shape == (heads[0], q_edges[-1])
    dq, dk, dv = filled_with_nan(q, k, v)
    flash._flash_attn_varlen_backward(
        dout, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, 300, 300,
        0.0, SCALE, causal, -1, -1, 0.0, None, False,
    )  # fmt: skip
    for (a, b), (c, d) in zip(pairwise(q_edges), pairwise(k_edges), strict=True):
        want = dense(q[a:b], k[c:d], v[c:d], dout[a:b], causal)
        got = (out[a:b], lse[:, a:b], dq[a:b], dk[c:d], dv[c:d])
        for value, expected in zip(got, want, strict=True):
            if expected.numel():
                close(value, expected)


def test_backward_takes_the_merged_result_of_several_blocks():
    """Ring attention computes blocks of keys one by one and hands in the result of all of them."""
    q, k, v, dout = tensors(20, 50, (4, 2))
    whole = dense(q, k, v, dout, causal=False)
    out, lse = whole[0], whole[1]
    parts = []
    for keys in (slice(0, 30), slice(30, 50)):
        dq, dk, dv = filled_with_nan(q, k[keys], v[keys])
        flash._flash_attn_backward(
            dout[None], q[None], k[None, keys], v[None, keys], out[None], lse[None],
            dq[None], dk[None], dv[None], 0.0, SCALE, False, -1, -1, 0.0, None, False,
        )  # fmt: skip
        parts.append((dq, dk, dv))
    close(parts[0][0] + parts[1][0], whole[2])
    close(torch.cat([parts[0][1], parts[1][1]]), whole[3])
    close(torch.cat([parts[0][2], parts[1][2]]), whole[4])


def test_gradients_go_into_strided_buffers():
    q, k, v, dout = tensors(16, 16, (4, 2))
    whole = torch.full((2, 20, 4, DIM), math.nan, dtype=q.dtype)
    args = [x.unflatten(0, (2, 8)) for x in (dout, q, k, v)]
    out, lse, _, _ = flash._flash_attn_forward(
        *args[1:], 0.0, SCALE, True, -1, -1, 0.0, None, False
    )
    dq, dk, dv = whole[:, :8], *filled_with_nan(args[2], args[3])
    flash._flash_attn_backward(
        *args, out, lse, dq, dk, dv, 0.0, SCALE, True, -1, -1, 0.0, None, False
    )
    close(dq[1], dense(q[8:], k[8:], v[8:], dout[8:], True)[2])
    assert whole[:, 8:].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "tolerance", "lse_tolerance"),
    [(torch.float32, 2e-6, 2e-6), (torch.bfloat16, 1e-2, 1e-4)],
)
def test_lower_precisions_have_an_fp32_lse_and_results_of_their_own_dtype(
    dtype, tolerance, lse_tolerance
):
    q, k, v, dout = tensors(300, 300, (4, 2), dtype)
    out, lse, _, _ = flash._flash_attn_forward(
        q[None], k[None], v[None], 0.0, SCALE, True, -1, -1, 0.0, None, False
    )
    assert out.dtype == dtype and lse.dtype == torch.float32
    want = dense(q, k, v, dout, True)
    close(out[0], want[0], tolerance)
    close(lse[0], want[1], lse_tolerance)


@pytest.mark.parametrize(
    "unsupported", [{"dropout_p": 0.1}, {"softcap": 30.0}, {"window_size_left": 8}]
)
def test_what_is_not_there_is_not_ignored(unsupported):
    q, k, v, _ = tensors(8, 8, (2, 2))
    edges = torch.tensor([0, 8], dtype=torch.int32)
    call = {"dropout_p": 0.0, "softmax_scale": SCALE, "causal": True, **unsupported}
    with pytest.raises(NotImplementedError, match="only attention without"):
        flash._flash_attn_varlen_forward(q, k, v, edges, edges, 8, 8, **call)


INSTALLED = """
import importlib.util
from anchorcontext.testing.flash_attn_cpu import install_flash_attn_cpu
first = install_flash_attn_cpu()
assert install_flash_attn_cpu() is first
import flash_attn.flash_attn_interface as interface
assert importlib.util.find_spec("flash_attn") and first.device_type == "cpu"
from anchorcontext.parallel.ring_flash_attn import load_submodule
module = load_submodule("zigzag_ring_flash_attn")
assert module._flash_attn_forward is interface._flash_attn_forward
"""


def test_the_package_finds_the_functions_once_they_are_installed():
    subprocess.run([sys.executable, "-c", INSTALLED], check=True, timeout=60)


def test_a_real_flash_attn_is_never_replaced(monkeypatch):
    real = types.ModuleType("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", real)
    with pytest.raises(UserError, match="never replaced"):
        install_flash_attn_cpu()
    assert sys.modules["flash_attn"] is real
