"""Merging partial softmax results, and the anchor as an exact rank-1 correction."""

from __future__ import annotations

import math

import pytest
import torch

from anchorcontext.kernels import (
    SoftmaxState,
    anchor_backward_,
    anchor_forward_,
    cpu_library,
    get_engine,
    merge,
    merge_,
    merge_rows_,
)
from anchorcontext.kernels.interface import Tiles

INF, NAN = math.inf, math.nan
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
SCALE = 0.3  # not D ** -0.5


def state_of(out, lse) -> SoftmaxState:
    """A one-row, one-head, D = 2 state."""
    return SoftmaxState(torch.full((1, 1, 2), out), torch.full((1, 1), lse))


@pytest.mark.parametrize(
    ("lse_a", "out_a", "lse_b", "out_b", "lse", "out"),
    [
        (-INF, 0.0, -INF, 7.0, -INF, 0.0),
        (-INF, 0.0, -INF, NAN, -INF, 0.0),
        (-INF, 0.0, INF, NAN, -INF, 0.0),
        (-INF, 0.0, 1.3, 0.7, 1.3, 0.7),
        (1.3, 0.7, -INF, 5.0, 1.3, 0.7),
        (1.3, 0.7, INF, 5.0, 1.3, 0.7),
        (1.3, 0.7, INF, NAN, 1.3, 0.7),
        (1.3, 0.7, -INF, INF, 1.3, 0.7),
        (300.0, 0.7, -300.0, 5.0, 300.0, 0.7),
        (-300.0, 0.7, 300.0, 5.0, 300.0, 5.0),
        (0.0, 1.0, 0.0, 3.0, math.log(2), 2.0),
    ],
)
@pytest.mark.parametrize("shortcut", [True, False], ids=["shortcut", "arithmetic"])
def test_merge_table(monkeypatch, shortcut, lse_a, out_a, lse_b, out_b, lse, out):
    if not shortcut:
        monkeypatch.setattr(merge, "_all_empty", lambda lse: False)
    state = state_of(out_a, lse_a)
    block = state_of(out_b, lse_b)
    merge_(state, 0, 1, block.out, block.lse)
    assert torch.equal(state.lse, torch.full((1, 1), lse))
    assert torch.equal(state.out, torch.full((1, 1, 2), out))


def softmax_parts(num_parts, dtype=torch.float64, spread=1.0):
    """The (out, lse) of ``num_parts`` key blocks of 5 rows x 3 heads, and of all keys together."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(num_parts, 5, 3, 7, generator=generator, dtype=torch.float64)
    scores += spread * torch.randn(num_parts, 1, 1, 1, generator=generator, dtype=torch.float64)
    values = torch.randn(num_parts, 5, 3, 7, 4, generator=generator, dtype=torch.float64)
    outs = (scores.softmax(-1).unsqueeze(-1) * values).sum(-2)
    lses = scores.logsumexp(-1)
    all_scores, all_values = scores.movedim(0, 2).flatten(2, 3), values.movedim(0, 2).flatten(2, 3)
    whole = (all_scores.softmax(-1).unsqueeze(-1) * all_values).sum(-2)
    return outs.to(dtype), lses, whole, all_scores.logsumexp(-1)


@pytest.mark.parametrize("spread", [1.0, 30.0, 1000.0])
@pytest.mark.parametrize("num_parts", [2, 8])
def test_merging_parts_gives_the_softmax_over_all_keys(num_parts, spread):
    outs, lses, whole_out, whole_lse = softmax_parts(num_parts, spread=spread)
    for order in (range(num_parts), reversed(range(num_parts))):
        state = SoftmaxState.empty(whole_out)
        for part in order:
            merge_(state, 0, 5, outs[part], lses[part])
        assert torch.allclose(state.out, whole_out, rtol=0, atol=1e-14)
        assert torch.allclose(state.lse, whole_lse, rtol=1e-15, atol=1e-14)


def test_many_low_precision_parts_are_accumulated_in_fp32():
    outs, lses, whole_out, whole_lse = softmax_parts(64, dtype=torch.bfloat16)
    state = SoftmaxState.empty(outs[0])
    for out, lse in zip(outs, lses, strict=True):
        merge_(state, 0, 5, out, lse)
    assert state.out.dtype == state.lse.dtype == torch.float32
    assert torch.allclose(state.lse.double(), whole_lse, rtol=1e-6, atol=0)
    exact = SoftmaxState.empty(whole_out)
    for out, lse in zip(outs, lses, strict=True):
        merge_(exact, 0, 5, out, lse)
    assert torch.allclose(state.out.double(), exact.out, rtol=0, atol=1e-6)


def test_merge_touches_only_its_rows_in_any_blocking(monkeypatch):
    outs, lses, _, _ = softmax_parts(2)
    whole = SoftmaxState(outs[0].clone(), lses[0].clone())
    merge_(whole, 0, 5, outs[1], lses[1])
    monkeypatch.setattr(merge, "CPU_BLOCK_ELEMENTS", 24)  # two rows a block
    part = SoftmaxState(outs[0].clone(), lses[0].clone())
    merge_(part, 1, 4, outs[1][1:4], lses[1][1:4])
    assert torch.equal(part.out[1:4], whole.out[1:4])
    assert torch.equal(part.lse[1:4], whole.lse[1:4])
    assert torch.equal(part.out[[0, 4]], outs[0][[0, 4]])


@pytest.mark.parametrize("seen", [True, False], ids=["into results", "into empty rows"])
def test_merge_rows_equals_merge_on_those_rows(seen):
    outs, lses, _, _ = softmax_parts(2)
    state = SoftmaxState.empty(outs[0])
    if seen:
        merge_(state, 0, 5, outs[0], lses[0])
    expected = SoftmaxState(state.out.clone(), state.lse.clone())
    rows = torch.tensor([4, 0, 2])
    merge_rows_(state, rows, outs[1][rows], lses[1][rows])
    for row in rows.tolist():
        merge_(expected, row, row + 1, outs[1][row : row + 1], lses[1][row : row + 1])
    assert torch.equal(state.out, expected.out)
    assert torch.equal(state.lse, expected.lse)


# The anchor. Row 0 of k and v is the anchor; queries 3..N of a causal document list see it through
# the correction, and the tiles hold everything else.


@pytest.fixture(params=["kernel", "torch"])
def either(request):
    """The correction in C, and in torch."""
    request.getfixturevalue("c_kernels" if request.param == "kernel" else "no_c_kernels")


def anchored(oracle, heads, dtype, num_rows=40, anchor_scale=50.0):
    """Inputs with a loud anchor, the tiles without it, and the dense oracle with it."""
    x = oracle.inputs(num_rows, num_rows, heads, dtype)
    x.v[0] *= anchor_scale
    tiles = [(0, 1, 0, 1, 1), (1, 9, 1, 9, 1), (9, 30, 9, 30, 1), (30, 39, 30, 39, 1)]
    visible = oracle.visible(tiles, num_rows, num_rows)
    visible[1:, 0] = True  # row 39 sees nothing else
    return x, tiles, oracle.attention(x.q, x.k, x.v, x.dout, visible, SCALE)


def with_anchor(x, tiles):
    """out, lse, dq, dk, dv from engine and anchor correction."""
    engine = get_engine("reference", device=x.q.device, dtype=x.q.dtype)
    state, tiles, num_rows = SoftmaxState.empty(x.q), Tiles(tiles), len(x.q)
    engine.forward(x.q, x.k, x.v, tiles, SCALE, state)
    anchor_forward_(state, x.q, x.k[0], x.v[0], SCALE, 1, num_rows)
    out = state.out.to(x.q.dtype)
    grads = [torch.zeros(y.shape, dtype=state.out.dtype) for y in (x.q, x.k, x.v)]
    engine.backward(x.dout, x.q, x.k, x.v, out, state.lse, tiles, SCALE, *grads)
    dq, dk, dv = grads
    dk0, dv0 = torch.zeros_like(dk[0]), torch.zeros_like(dv[0])
    anchor = (x.dout, x.q, x.k[0], x.v[0], out, state.lse, SCALE, 1, num_rows, dq, dk0, dv0)
    anchor_backward_(*anchor)
    dk[0] += dk0
    dv[0] += dv0
    return {"out": state.out, "lse": state.lse, "dq": dq, "dk": dk, "dv": dv}


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (9, 3), (4, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_anchor_correction_equals_dense_autograd(either, dtype, heads, oracle):
    x, tiles, expected = anchored(oracle, heads, dtype)
    tolerance = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    for name, value in with_anchor(x, tiles).items():
        reference = getattr(expected, name)
        error = (value.double() - reference).abs().max()
        assert error <= tolerance * max(1.0, float(reference.abs().max())), name


def test_anchor_rows_have_the_same_bits_in_any_blocking(no_c_kernels, monkeypatch, oracle):
    x, tiles, _ = anchored(oracle, (4, 2), torch.float32)
    whole = with_anchor(x, tiles)
    monkeypatch.setattr(merge, "CPU_BLOCK_ELEMENTS", 3 * 64)
    blocked = with_anchor(x, tiles)
    for name in ("out", "lse", "dq"):
        assert torch.equal(whole[name], blocked[name]), name
    for name in ("dk", "dv"):
        assert torch.allclose(whole[name], blocked[name], rtol=1e-5, atol=1e-5), name


def test_anchor_touches_only_the_given_rows(either, oracle):
    x = oracle.inputs(12, 12, (4, 2), torch.float32)
    state = SoftmaxState.empty(x.q)
    anchor_forward_(state, x.q, x.k[0], x.v[0], SCALE, 3, 7)
    seen = torch.isfinite(state.lse).all(dim=1).nonzero().flatten().tolist()
    assert seen == [3, 4, 5, 6]
    dq, dk0, dv0 = (torch.zeros(y.shape) for y in (x.q, x.k[0], x.v[0]))
    anchor = (x.dout, x.q, x.k[0], x.v[0], state.out, state.lse, SCALE, 3, 7, dq, dk0, dv0)
    anchor_backward_(*anchor)
    dv0_expected = x.dout[3:7].unflatten(1, (2, 2)).sum((0, 2))
    assert torch.allclose(dv0, dv0_expected, rtol=0, atol=1e-6)


def test_a_query_that_sees_only_the_anchor_has_its_value_and_no_score_gradient(either, oracle):
    x = oracle.inputs(6, 1, (4, 2), torch.float32)
    state = SoftmaxState.empty(x.q)
    anchor_forward_(state, x.q, x.k[0], x.v[0], SCALE, 0, 6)
    assert torch.equal(state.out, x.v[0].repeat_interleave(2, 0).expand(6, 4, 16))
    dq, dk0, dv0 = (torch.zeros(y.shape) for y in (x.q, x.k[0], x.v[0]))
    anchor = (x.dout, x.q, x.k[0], x.v[0], state.out, state.lse, SCALE, 0, 6, dq, dk0, dv0)
    anchor_backward_(*anchor)
    assert torch.equal(dq, torch.zeros_like(dq))
    assert torch.equal(dk0, torch.zeros_like(dk0))


def test_anchor_scores_of_bf16_inputs_are_not_rounded_to_bf16(either, oracle):
    x = oracle.inputs(64, 1, (4, 2), torch.bfloat16, head_dim=64)
    state = SoftmaxState.empty(x.q)
    anchor_forward_(state, x.q, x.k[0], x.v[0], 1.0, 0, 64)
    k0 = x.k[0].double().repeat_interleave(2, 0)
    assert (state.lse.double() - (x.q.double() * k0).sum(-1)).abs().max() < 1e-5


def test_anchor_backward_is_zero_and_finite_where_the_lse_is_empty(either, oracle):
    x = oracle.inputs(5, 1, (4, 2), torch.float32)
    state = SoftmaxState.empty(x.q)
    dq, dk0, dv0 = (torch.zeros(y.shape) for y in (x.q, x.k[0], x.v[0]))
    anchor = (x.dout, x.q, x.k[0], x.v[0], state.out, state.lse, SCALE, 0, 5, dq, dk0, dv0)
    anchor_backward_(*anchor)
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in (dq, dk0, dv0))


def test_the_kernel_gives_the_same_bits_on_any_number_of_threads(c_kernels, oracle):
    x = oracle.inputs(5000, 1, (4, 2), torch.float32, head_dim=24)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            state = SoftmaxState.empty(x.q)
            anchor_forward_(state, x.q, x.k[0], x.v[0], SCALE, 3, 4999)
            dq, dk0, dv0 = (torch.zeros(y.shape) for y in (x.q, x.k[0], x.v[0]))
            anchor = (x.dout, x.q, x.k[0], x.v[0], state.out + 0.1, state.lse, SCALE, 3, 4999)
            anchor_backward_(*anchor, dq, dk0, dv0)
            found.append((state.out, state.lse, dq, dk0, dv0))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_kernel_and_torch_agree_on_strided_rows_of_any_width(c_kernels, monkeypatch, oracle):
    for head_dim in (1, 7, 64, 96):
        x = oracle.inputs(600, 1, (6, 2), torch.float32, head_dim=2 * head_dim)
        q, dout = x.q[..., head_dim:], x.dout[..., :head_dim]
        k0, v0 = x.k[0, :, head_dim:], x.v[0, :, :head_dim]
        results = []
        for kernel in (True, False):
            with monkeypatch.context() as patch:
                if not kernel:
                    patch.setattr(cpu_library, "_missing", lambda: "switched off by a test")
                state = SoftmaxState(x.dout[..., head_dim:].clone(), x.q[..., 0].clone())
                anchor_forward_(state, q, k0, v0, SCALE, 1, 600)
                dq, dk0, dv0 = (torch.zeros(y.shape) for y in (q, k0, v0))
                anchor = (dout, q, k0, v0, state.out, state.lse, SCALE, 1, 600, dq, dk0, dv0)
                anchor_backward_(*anchor)
                results.append((state.out, state.lse, dq, dk0, dv0))
        for a, b in zip(*results, strict=True):
            assert (a - b).abs().max() <= 2e-6 * max(1.0, float(b.abs().max())), head_dim
