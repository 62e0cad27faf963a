"""The engines over CUDA's variable-length flash attention, against the functions' contracts.

The vendor's kernels need a GPU. What they promise (shapes, LSE layout, bottom-right causal masks,
rows without keys, gradients from the merged LSE) is implemented here on CPU tensors, in fp64, and
the engines run on it unchanged: only the kernels themselves are untested.
"""

from __future__ import annotations

import inspect
import sys
import types
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from anchorcontext.errors import UserError
from anchorcontext.kernels import SoftmaxState, Tiles, varlen
from anchorcontext.kernels.varlen_calls import varlen_calls
from anchorcontext.testing import flash_attn_cpu

CPU = torch.device("cpu")
SCALE = 0.3
FLASH_ATTN = ("flash_attn", "flash_attn.flash_attn_interface")


def aten_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask,
    *, scale=None, window_size_left=None, window_size_right=None, seqused_k=None,
    alibi_slopes=None, block_table=None, num_splits=None,
):  # fmt: skip
    """``aten::_flash_attention_forward`` on packed sequences."""
    assert max_q == cum_seq_q.diff().max() and max_k == cum_seq_k.diff().max()
    assert (window_size_left, window_size_right) == (-1, 0 if is_causal else -1)
    assert not return_debug_mask
    out, lse, *_ = flash_attn_cpu._flash_attn_varlen_forward(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, scale, is_causal
    )
    nothing = query.new_empty(0)
    return out, lse, torch.zeros(2, dtype=torch.uint64), nothing, nothing


def aten_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
    is_causal, rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    """``aten::_flash_attention_backward`` on packed sequences."""
    assert grad_out.is_contiguous() and logsumexp.is_contiguous()
    assert logsumexp.shape == (query.shape[1], query.shape[0])
    grads = [torch.full_like(x, torch.nan) for x in (query, key, value)]
    flash_attn_cpu._flash_attn_varlen_backward(
        grad_out, query, key, value, out, logsumexp, *grads, cum_seq_q, cum_seq_k, max_q, max_k,
        dropout_p, scale, is_causal, window_size_left, window_size_right, 0.0, None, False,
    )  # fmt: skip
    return tuple(grads)


def flash_attn_3():
    """FlashAttention-3's module: one function for batches and packed sequences, other names."""
    module = types.ModuleType("flash_attn_interface")

    def _flash_attn_forward(
        q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
        max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None, causal=False,
        window_size_left=-1, window_size_right=-1, softcap=0.0, num_splits=1,
    ):  # fmt: skip
        out, lse, *_ = flash_attn_cpu._flash_attn_varlen_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale,
            causal,
        )  # fmt: skip
        return out, lse, torch.tensor([]), torch.tensor([])

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None,
        sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None,
        softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1,
        softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        return flash_attn_cpu._flash_attn_varlen_backward(
            dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
            max_seqlen_k, 0.0, softmax_scale, is_causal, -1, -1, 0.0, None, deterministic,
        )  # fmt: skip

    # As torch.library.custom_op wraps them: the signature is that of ``_init_fn``.
    for function in (_flash_attn_forward, _flash_attn_backward):
        operator = lambda *args, _call=function, **kwargs: _call(*args, **kwargs)  # noqa: E731
        operator._init_fn = function
        setattr(module, function.__name__, operator)
    return module


@pytest.fixture(scope="module")
def aten_on_cpu():
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", aten_forward, "CPU")
    library.impl("_flash_attention_backward", aten_backward, "CPU")
    yield
    library._destroy()


@pytest.fixture(params=["varlen", "flash_attn", "flash_attn 3"])
def engine(request, monkeypatch, aten_on_cpu):
    def backward(dout, q, k, v, out, lse, *rest):
        assert not (lse == -torch.inf).any(), "the kernels know +inf for rows without keys"
        return exact_backward(dout, q, k, v, out, lse, *rest)

    exact_backward = flash_attn_cpu._backward
    monkeypatch.setattr(flash_attn_cpu, "_backward", backward)
    if request.param == "varlen":
        yield varlen.VarlenEngine()
        return
    if request.param == "flash_attn":
        flash_attn_cpu.install_flash_attn_cpu()
    else:
        monkeypatch.setitem(sys.modules, "flash_attn_interface", flash_attn_3())
        monkeypatch.setattr(varlen, "_is_hopper", lambda device: True)
    yield varlen.FlashAttnEngine()
    for name in FLASH_ATTN:
        sys.modules.pop(name, None)


def run(engine, x, tiles):
    state = SoftmaxState.empty(x.q)
    tiles = Tiles(tiles)
    engine.forward(x.q, x.k, x.v, tiles, SCALE, state)
    sums = [torch.zeros(y.shape, dtype=state.out.dtype) for y in (x.q, x.k, x.v)]
    engine.backward(x.dout, x.q, x.k, x.v, state.out.to(x.q.dtype), state.lse, tiles, SCALE, *sums)
    return SimpleNamespace(out=state.out, lse=state.lse, dq=sums[0], dk=sums[1], dv=sums[2])


@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (9, 3)], ids=lambda h: f"{h[0]}q{h[1]}kv")
def test_equals_the_oracle(engine, oracle, tile_list, heads):
    array = np.asarray(tile_list)
    x = oracle.inputs(array[:, 1].max() + 2, array[:, 3].max() + 2, heads, torch.float64)
    visible = oracle.visible(tile_list, len(x.q), len(x.k))
    expected = oracle.attention(x.q, x.k, x.v, x.dout, visible, SCALE)
    found = run(engine, x, tile_list)
    seen = visible.any(1)
    assert torch.equal(found.lse == -torch.inf, (~seen)[:, None].expand_as(found.lse))
    assert (found.lse[seen] - expected.lse[seen]).abs().max() < 1e-6  # fp32 on the way back
    for name, limit in (("out", 1e-12), ("dq", 1e-5), ("dk", 1e-5), ("dv", 1e-5)):
        assert (getattr(found, name) - getattr(expected, name)).abs().max() < limit, name


def test_bf16_is_merged_and_added_up_in_fp32(engine, oracle):
    tiles = [(0, 64, 64 * i, 64 * (i + 1), 0) for i in range(4)]
    x = oracle.inputs(64, 256, (4, 2), torch.bfloat16)
    expected = oracle.attention(x.q, x.k, x.v, x.dout, torch.ones(64, 256) > 0, SCALE)
    found = run(engine, x, tiles)
    assert {y.dtype for y in vars(found).values()} == {torch.float32}
    for name in vars(expected):
        error = getattr(found, name).double() - getattr(expected, name)
        assert error.norm() <= 5e-3 * getattr(expected, name).norm(), name


def test_gradients_are_added_to_what_is_there(engine, oracle):
    """In rows that lie end to end and in scattered ones; a row that saw nothing gets none."""
    tiles = Tiles([(0, 8, 0, 8, 1), (8, 12, 8, 12, 1), (0, 8, 20, 30, 0), (14, 16, 12, 14, 0)])
    x = oracle.inputs(18, 30, (2, 1), torch.float64)
    state = SoftmaxState.empty(x.q)
    engine.forward(x.q, x.k, x.v, tiles, SCALE, state)
    results = []
    for start in (0.0, 1.0):
        sums = [torch.full_like(y, start) for y in (x.q, x.k, x.v)]
        for _ in range(2):
            args = (x.dout, x.q, x.k, x.v, state.out, state.lse, tiles, SCALE)
            engine.backward(*args, *sums)
        results.append(torch.cat([y.flatten() for y in sums]))
    once = [torch.zeros_like(y) for y in (x.q, x.k, x.v)]
    engine.backward(x.dout, x.q, x.k, x.v, state.out, state.lse, tiles, SCALE, *once)
    expected = 2 * torch.cat([y.flatten() for y in once])
    assert (results[0] - expected).abs().max() < 1e-12
    assert (results[1] - expected - 1).abs().max() < 1e-12


@pytest.mark.parametrize("deterministic", [False, True])
def test_asks_for_the_deterministic_backward(engine, oracle, monkeypatch, deterministic):
    """torch's own operator reads the global setting by itself."""
    asked = []
    name = "_flash_attn_varlen_backward"
    real = getattr(flash_attn_cpu, name)
    bound = inspect.signature(real).bind

    def backward(*args, **kwargs):
        asked.append(bound(*args, **kwargs).arguments["deterministic"])
        return real(*args, **kwargs)

    backward.__signature__ = inspect.signature(real)
    monkeypatch.setattr(flash_attn_cpu, name, backward)
    if "flash_attn" in sys.modules:
        monkeypatch.setattr(sys.modules["flash_attn.flash_attn_interface"], name, backward)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    run(engine, oracle.inputs(4, 4, (2, 1), torch.float64), [(0, 4, 0, 4, 1)])
    assert asked == [deterministic and engine.name == "flash_attn"]


def test_calls_share_no_query_and_no_key_row(oracle, tile_list):
    """So that a merge and an addition to a row happen once a call; and none is lost."""
    pairs = set()
    for call in varlen_calls(Tiles(tile_list), CPU):
        sides = []
        for rows in (call.queries, call.keys):
            index = np.arange(rows.start, rows.stop) if rows.index is None else rows.index.numpy()
            assert len(set(index.tolist())) == len(index) == rows.cu_seqlens[-1]
            assert rows.longest == rows.cu_seqlens.diff().max()
            sides.append(np.split(index, rows.cu_seqlens[1:-1].numpy()))
        for q, k in zip(*sides, strict=True):
            pairs.add((q[0], q[-1] + 1, k[0], k[-1] + 1, int(call.causal)))
    assert pairs == {tuple(map(int, tile)) for tile in tile_list}


def test_documents_end_to_end_are_one_call_on_views():
    tiles = Tiles([(a, a + 8, a, a + 8, 1) for a in range(0, 8000, 8)])
    (call,) = varlen_calls(tiles, CPU)
    assert call.queries.index is None and call.keys.index is None
    assert varlen_calls(tiles, CPU)[0] is call, "made once"


@pytest.mark.parametrize("name", ["varlen", "flash_attn"])
def test_is_refused_on_cpu_with_the_reason(name):
    engine = {"varlen": varlen.VarlenEngine, "flash_attn": varlen.FlashAttnEngine}[name]
    reason = engine.why_not(CPU, torch.bfloat16)
    assert reason is not None and ("not on cpu" in reason or "pip install" in reason)


@pytest.fixture
def on_hopper(monkeypatch):
    """As if on a Hopper GPU, with the functions for CPU tensors as flash-attn 2."""
    monkeypatch.setattr(varlen, "_is_hopper", lambda device: True)
    flash_attn_cpu.install_flash_attn_cpu()
    yield sys.modules["flash_attn.flash_attn_interface"]
    for name in FLASH_ATTN:
        sys.modules.pop(name, None)


def test_flash_attention_3_is_for_hopper_and_must_not_be_too_old(on_hopper, monkeypatch):
    new, old = flash_attn_3(), types.ModuleType("flash_attn_interface")
    old._flash_attn_forward = lambda q, k, v, softmax_scale, causal, window_size=(-1, -1): None
    monkeypatch.setitem(sys.modules, "flash_attn_interface", new)
    assert varlen._interface(hopper=True) is new
    assert varlen._interface(hopper=False) is on_hopper
    monkeypatch.setitem(sys.modules, "flash_attn_interface", old)
    assert varlen._interface(hopper=True) is on_hopper
    on_hopper._flash_attn_varlen_forward = old._flash_attn_forward
    reason = varlen.FlashAttnEngine.why_not(CPU, torch.bfloat16)
    assert "flash_attn_interface is too old" in reason and "--upgrade flash-attn" in reason


def test_a_flash_attn_built_for_another_torch_is_passed_over(on_hopper, monkeypatch, tmp_path):
    (tmp_path / "flash_attn_interface.py").write_text("raise ImportError('undefined symbol: x')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(varlen, "_broken", {})
    assert varlen._interface(hopper=True) is on_hopper
    sys.modules.pop("flash_attn.flash_attn_interface")
    monkeypatch.setattr(sys.modules["flash_attn"], "__path__", [])
    reason = varlen.FlashAttnEngine.why_not(CPU, torch.bfloat16)
    assert "cannot be imported" in reason and "ImportError: undefined symbol: x" in reason


@pytest.mark.parametrize("head_dim", [20, 264])
def test_a_head_dimension_it_does_not_take_is_refused(engine, oracle, head_dim):
    x = oracle.inputs(4, 4, (2, 1), torch.float64, head_dim=head_dim)
    with pytest.raises(UserError, match=f"head dimension {head_dim}.*multiples of 8 up to 256"):
        run(engine, x, [(0, 4, 0, 4, 1)])


def test_flash_attn_takes_16_bit_only(engine):
    if engine.name == "flash_attn" and not varlen._is_hopper(CPU):
        assert engine.why_not(CPU, torch.bfloat16) is None
        assert "takes bf16 and fp16" in engine.why_not(CPU, torch.float32)
