"""The fused merge and anchor kernels against their torch forms.

Run by test_triton_interpreter.py.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from anchorcontext.kernels import SoftmaxState, merge, triton_merge

SCALE = 0.25
INF, NAN = math.inf, math.nan
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS = [(2, 2), (4, 2), (3, 1)]


def make(num_rows, heads, head_dim, dtype, seed=0) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    num_heads, num_kv_heads = heads
    q, dout, block_out = (draw(num_rows, num_heads, head_dim).to(dtype) for _ in range(3))
    k0, v0 = (draw(num_kv_heads, head_dim).to(dtype) for _ in range(2))
    state = SoftmaxState(draw(num_rows, num_heads, head_dim), 3 * draw(num_rows, num_heads))
    return SimpleNamespace(
        q=q, dout=dout, k0=k0, v0=v0, state=state,
        block_out=block_out, block_lse=3 * draw(num_rows, num_heads),
    )  # fmt: skip


def copy(state) -> SoftmaxState:
    return SoftmaxState(state.out.clone(), state.lse.clone())


def assert_same(found, expected) -> None:
    assert torch.equal(found.isfinite(), expected.isfinite())
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("lse_a", "out_a", "lse_b", "out_b", "lse", "out"),
    [
        (-INF, 0.0, -INF, NAN, -INF, 0.0),
        (-INF, 0.0, INF, NAN, -INF, 0.0),
        (-INF, 0.0, 1.3, 0.7, 1.3, 0.7),
        (1.3, 0.7, -INF, NAN, 1.3, 0.7),
        (1.3, 0.7, INF, NAN, 1.3, 0.7),
        (300.0, 0.7, -300.0, 5.0, 300.0, 0.7),
        (-300.0, 0.7, 300.0, 5.0, 300.0, 5.0),
    ],
)
def test_an_empty_or_negligible_side_leaves_the_other_bit_for_bit(
    lse_a, out_a, lse_b, out_b, lse, out
):
    state = SoftmaxState(torch.full((1, 1, 2), out_a), torch.full((1, 1), lse_a))
    triton_merge.merge_(state, 0, 1, torch.full((1, 1, 2), out_b), torch.full((1, 1), lse_b))
    assert torch.equal(state.lse, torch.full((1, 1), lse))
    assert torch.equal(state.out, torch.full((1, 1, 2), out))


@pytest.mark.parametrize("head_dim", [16, 24, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge(dtype, head_dim):
    x = make(37, (3, 1), head_dim, dtype)
    x.state.lse[5:9], x.block_lse[7:12] = -INF, INF
    x.state.out[5:9] = 0
    block_lse = x.block_lse.T.contiguous().T  # as the engines return it: head-major
    found, expected = copy(x.state), copy(x.state)
    triton_merge.merge_(found, 2, 30, x.block_out[2:30], block_lse[2:30])
    merge.merge_(expected, 2, 30, x.block_out[2:30], block_lse[2:30])
    assert_same(found.out, expected.out)
    assert_same(found.lse, expected.lse)
    assert torch.equal(found.out[:2], x.state.out[:2]) and torch.equal(
        found.out[30:], x.state.out[30:]
    )


def test_merge_of_scattered_rows():
    x = make(40, (2, 1), 16, torch.bfloat16)
    rows = torch.randperm(40, generator=torch.Generator().manual_seed(3))[:23]
    found, expected = copy(x.state), copy(x.state)
    triton_merge.merge_rows_(found, rows, x.block_out[:23], x.block_lse[:23])
    merge.merge_rows_(expected, rows, x.block_out[:23], x.block_lse[:23])
    assert_same(found.out, expected.out)
    assert_same(found.lse, expected.lse)


@pytest.mark.parametrize("heads", HEADS, ids=lambda h: f"{h[0]}q{h[1]}kv")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_anchor(dtype, heads, monkeypatch):
    """Forward and backward on some of the rows, one of them empty before; several chunks."""
    monkeypatch.setattr(triton_merge, "CHUNK_ROWS", 16)
    x = make(45, heads, 24, dtype)
    x.state.out[10], x.state.lse[10] = 0, -INF
    start, stop = 3, 40
    found, expected = copy(x.state), copy(x.state)
    args = (x.q, x.k0, x.v0, SCALE, start, stop)
    triton_merge.anchor_forward_(found, *args)
    merge.anchor_forward_(expected, *args)
    assert_same(found.out, expected.out)
    assert_same(found.lse, expected.lse)

    lse = expected.lse.clone()
    lse[12] = -INF
    grads = []
    for module in (triton_merge, merge):
        dq, dk0, dv0 = (torch.ones(y.shape) for y in (x.q, x.k0, x.v0))
        out = expected.out.to(dtype)
        module.anchor_backward_(x.dout, x.q, x.k0, x.v0, out, lse, SCALE, start, stop, dq, dk0, dv0)
        grads.append((dq, dk0, dv0))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-6, atol=5e-6)
    assert torch.equal(grads[0][0][:start], torch.ones_like(grads[0][0][:start]))


def test_the_gradient_of_a_query_that_sees_only_the_anchor_is_exactly_zero():
    x = make(4, (2, 1), 16, torch.float32)
    state = SoftmaxState.empty(x.q)
    triton_merge.anchor_forward_(state, x.q, x.k0, x.v0, SCALE, 0, 4)
    dq, dk0, dv0 = (torch.zeros(y.shape) for y in (x.q, x.k0, x.v0))
    triton_merge.anchor_backward_(
        x.dout, x.q, x.k0, x.v0, state.out, state.lse, SCALE, 0, 4, dq, dk0, dv0
    )
    assert not dq.any() and not dk0.any()
    torch.testing.assert_close(dv0[0], x.dout.sum((0, 1)), rtol=1e-6, atol=1e-6)
