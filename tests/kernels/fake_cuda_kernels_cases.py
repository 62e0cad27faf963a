"""Every engine on CUDA tensors without values: one device, and no call waits for it.

What engines call (flash attention, FlexAttention's compiled kernels, Triton's launches) is replaced
by what gives results of the documented shapes and checks what it is given. The device is not the
current one. Run by tests/test_fake_cuda.py.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from anchorcontext.errors import UserError
from anchorcontext.kernels import (
    AnchorKeys,
    Rotation,
    SoftmaxState,
    Tiles,
    anchor_backward_,
    anchor_forward_,
    backward_with_anchors_,
    forward_with_anchors_,
    get_engine,
    merge,
    merge_,
    merge_rows_,
    triton_merge,
)
from anchorcontext.kernels.flex import BLOCK
from anchorcontext.kernels.triton_engine import TritonEngine
from anchorcontext.testing import flash_attn_cpu
from anchorcontext.testing.fake_cuda import fake_cuda

DEVICE = torch.device("cuda:1")
HEADS, HEAD_DIM, SCALE = (4, 2), 64, 0.3
QUERIES = np.array([[0, 2, 9], [1, 12, 30]])
TILES = {
    "documents end to end": [(a, a + 8, a, a + 8, 1) for a in range(0, 32, 8)],
    "over the same rows": [(0, 30, 0, 20, 0), (0, 30, 20, 60, 1), (8, 9, 60, 64, 0)],
    "scattered": [(a, a + 5, 60 - a, 65 - a, 1) for a in (0, 7, 19, 33)],
}
ENGINES = ("flash_attn", "flash_attn 3", "varlen", "flex", "triton", "triton rotated", "reference")


@pytest.fixture
def device():
    with fake_cuda() as found:
        yield found


def check_flash(q, k, v, cu_seqlens_q, cu_seqlens_k, *more):
    """What flash attention's C++ checks: devices, dtypes and strides."""
    for x in (q, k, v, *more):
        assert x.device == DEVICE and x.dtype == q.dtype == torch.bfloat16
        assert x.dim() == 3 and x.stride(-1) == 1
    for edges in (cu_seqlens_q, cu_seqlens_k):
        assert edges.device == DEVICE and edges.dtype == torch.int32 and edges.is_contiguous()


def flash_attention(version):
    """A module with the functions of flash-attn 2 or FlashAttention-3; their signatures are those
    of the functions for CPU tensors, or of tests/kernels/test_varlen_engines.py."""
    assert version in (2, 3)
    varlen = "_varlen" if version == 2 else ""
    name = "flash_attn.flash_attn_interface" if version == 2 else "flash_attn_interface"
    module = types.ModuleType(name)

    def forward(*args, **kwargs):
        a = bind("forward", args, kwargs)
        check_flash(a["q"], a["k"], a["v"], a["cu_seqlens_q"], a["cu_seqlens_k"])
        rows, heads, _ = a["q"].shape
        lse = torch.empty(heads, rows, dtype=torch.float32, device=DEVICE)
        return torch.empty_like(a["q"]), lse, None, None

    def backward(*args, **kwargs):
        a = bind("backward", args, kwargs)
        tensors = [a[name] for name in ("q", "k", "v")]
        more = [a[name] for name in ("dout", "out", "dq", "dk", "dv")]
        check_flash(*tensors, a["cu_seqlens_q"], a["cu_seqlens_k"], *more)
        lse = a["softmax_lse"]
        assert lse.device == DEVICE and lse.dtype == torch.float32 and lse.is_contiguous()
        assert lse.shape == (a["q"].shape[1], len(a["q"]))

    def bind(direction, args, kwargs):
        return signatures[direction].bind(*args, **kwargs).arguments

    signatures = {}
    for function in (forward, backward):
        direction = function.__name__
        if version == 2:
            real = getattr(flash_attn_cpu, f"_flash_attn_varlen_{direction}")
            signatures[direction] = inspect.signature(real)
        else:
            signatures[direction] = inspect.signature(FLASH_ATTN_3[direction])
        function.__signature__ = signatures[direction]
        setattr(module, f"_flash_attn{varlen}_{direction}", function)
    return module


def flash_attn_3_forward(
    q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
    max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None, causal=False,
    window_size_left=-1, window_size_right=-1, softcap=0.0, num_splits=1,
):  # fmt: skip
    """The arguments of FlashAttention-3 that we know of."""


def flash_attn_3_backward(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None,
    sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None,
    softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1,
    softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    """The arguments of FlashAttention-3 that we know of."""


FLASH_ATTN_3 = {"forward": flash_attn_3_forward, "backward": flash_attn_3_backward}


def flex_attention(q, k, v, block_mask, scale, enable_gqa, return_aux):
    """FlexAttention's compiled kernel: its checks, a look at the mask, results that depend on all
    inputs."""
    rows, keys = q.shape[2], k.shape[2]
    assert rows % BLOCK == keys % BLOCK == 0 and block_mask.seq_lengths == (rows, keys)
    for name, x in vars(block_mask).items():
        assert not isinstance(x, torch.Tensor) or x.device == DEVICE, name
    index = [torch.zeros(1, dtype=torch.int32, device=DEVICE) for _ in range(4)]
    assert block_mask.mask_mod(*index).dtype == torch.bool
    number = (k.float().sum() + v.float().sum()) * scale
    lse = q.float().sum(-1) + number
    assert enable_gqa and return_aux.lse
    return (q + number).to(q.dtype), SimpleNamespace(lse=lse)


@pytest.fixture
def engine(request, monkeypatch, device):
    name = request.param
    for package in ("flash_attn", "flash_attn_interface"):
        monkeypatch.delitem(sys.modules, package, raising=False)
    if name == "flash_attn":
        monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
        module = flash_attention(2)
        monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", module)
    if name == "flash_attn 3":
        monkeypatch.setitem(sys.modules, "flash_attn_interface", flash_attention(3))
    if name == "flex":
        monkeypatch.setattr("anchorcontext.kernels.flex._compiled", lambda: flex_attention)
    made = get_engine(name.split()[0], device=DEVICE, dtype=torch.bfloat16)
    made.rotated = name == "triton rotated"
    return made


def run(engine, x, tiles, anchors):
    """Forward of the tiles and the anchors, and backward."""
    rotation = x.rotation if getattr(engine, "rotated", False) else None
    state = SoftmaxState.empty(x.q)
    forward_with_anchors_(engine, x.q, x.k, x.v, tiles, SCALE, state, anchors, rotation)
    sums = [torch.zeros(y.shape, device=DEVICE) for y in (x.q, x.k, x.v, anchors.rows)]
    out = state.out.to(x.q.dtype)
    backward_with_anchors_(
        engine, x.dout, x.q, x.k, x.v, out, state.lse, tiles, SCALE, *sums[:3], anchors, sums[3],
        rotation,
    )  # fmt: skip
    return state, sums


def draw(num_queries, num_keys, packed=False):
    """Rows on the device; ``packed``: views of q, k and v side by side, as of one projection."""

    def rows(count, heads):
        if not packed:
            return torch.randn(count, heads, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
        width = HEADS[0] + 2 * HEADS[1]
        whole = torch.randn(count, width, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
        return whole[:, 1 : 1 + heads]

    def angles(count):
        return torch.randn(count, HEAD_DIM // 2, device=DEVICE)

    tables = [angles(count) for count in (*(num_queries,) * 2, *(num_keys,) * 2, 2, 2)]
    return SimpleNamespace(
        q=rows(num_queries, HEADS[0]),
        k=rows(num_keys, HEADS[1]),
        v=rows(num_keys, HEADS[1]),
        dout=rows(num_queries, HEADS[0]),
        anchors=AnchorKeys(
            torch.randn(2, 2, HEADS[1], HEAD_DIM, device=DEVICE, dtype=torch.bfloat16), QUERIES
        ),
        rotation=Rotation(*tables),
    )


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
@pytest.mark.parametrize("array", TILES.values(), ids=list(TILES))
def test_calls_neither_wait_nor_mix_devices(device, engine, array):
    tiles, x = Tiles(np.array(array)), draw(42, 70)
    run(engine, x, tiles, x.anchors)
    state, sums = run(engine, x, tiles, x.anchors)
    for result in (state.out, state.lse, *sums):
        assert result.device == DEVICE and result.dtype == torch.float32


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_rows_may_be_strided(device, engine):
    tiles = Tiles([(0, 20, 0, 20, 1), (20, 40, 20, 40, 1), (0, 20, 20, 40, 0)])
    x = draw(41, 43, packed=True)
    run(engine, x, tiles, x.anchors)


@pytest.mark.parametrize("engine", ["triton", "triton rotated", "flex"], indirect=True)
def test_anchors_alone(device, engine):
    """No tile in a step that still brings the anchors' column."""
    tiles, x = Tiles(np.zeros((0, 5))), draw(41, 1)
    run(engine, x, tiles, x.anchors)


def test_the_triton_engine_launches_once_forward_and_three_times_backward(device):
    x, tiles = draw(300, 300), Tiles([(0, 300, 0, 300, 1)])
    engine = TritonEngine(autotune=False)
    run(engine, x, tiles, x.anchors)
    device.launches.clear()
    run(engine, x, tiles, x.anchors)
    kernels = [launch.kernel for launch in device.launches]
    assert kernels == ["forward_kernel", "prepare_kernel", "dq_kernel", "dkdv_kernel"]


def test_tuning_launches_every_candidate(device):
    from anchorcontext.kernels import triton_config

    triton_config._tuned.clear()
    x, tiles = draw(30, 30), Tiles([(0, 30, 0, 30, 1)])
    run(TritonEngine(), x, tiles, x.anchors)
    sizes = {
        (launch.kernel, launch.arguments["BLOCK_M"], launch.arguments["BLOCK_N"])
        for launch in device.launches
        if "BLOCK_N" in launch.arguments
    }
    for kernel in triton_config.KERNELS:
        for config in triton_config.candidates(kernel, HEAD_DIM, x.q.dtype, False, (9, 0)):
            assert (f"{kernel}_kernel", config.block_m, config.block_n) in sizes


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "torch"])
def test_merges_and_anchors(device, fused, monkeypatch):
    """As Triton kernels, and in torch where Triton is missing."""
    monkeypatch.setattr(merge, "_fused_kernels", lambda at: triton_merge if fused else None)
    x, state = draw(50, 50), SoftmaxState.empty(draw(50, 1).q)
    out, lse = x.q[:40], torch.randn(HEADS[0], 40, device=DEVICE).t()
    rows = torch.arange(40, device=DEVICE)
    k0, v0 = x.anchors.rows[0]
    dq, dkv = torch.zeros(x.q.shape, device=DEVICE), torch.zeros(2, *k0.shape, device=DEVICE)
    merge_(state, 3, 43, out, lse)
    merge_rows_(state, rows, out, lse)
    anchor_forward_(state, x.q, k0, v0, SCALE, 5, 50)
    anchor_backward_(
        x.dout, x.q, k0, v0, state.out, state.lse, SCALE, 5, 50, dq, dkv[0], dkv[1]
    )  # fmt: skip
    kernels = [launch.kernel for launch in device.launches]
    fused_kernels = [f"{name}_kernel" for name in (*["merge"] * 2, "anchor_forward")]
    assert kernels == ([*fused_kernels, "anchor_backward_kernel"] if fused else [])


def test_auto_takes_varlen_and_without_it_flex(device, monkeypatch):
    choose = {"device": DEVICE, "dtype": torch.bfloat16}
    assert get_engine(**choose).name == "varlen"
    assert get_engine(**choose | {"dtype": torch.float32}).name == "flex"
    assert get_engine(**choose, rotates=True).name == "triton"
    with pytest.raises(UserError, match="'flash_attn' cannot serve"):
        get_engine("flash_attn", **choose)


class TestWhatIsFound:
    """The mistakes that all of this is for."""

    def test_an_index_on_the_host(self, device):
        with pytest.raises(AssertionError, match="crosses"):
            draw(4, 4).q[torch.arange(2)]

    def test_an_index_sent_in_every_call(self, device):
        with pytest.raises(AssertionError, match="crosses"):
            torch.from_numpy(np.arange(3)).to(DEVICE)

    def test_a_mask_on_the_host(self, device):
        with pytest.raises(RuntimeError, match=r"cuda:1.*cpu"):
            draw(4, 4).q.masked_fill(torch.zeros(4, 1, 1, dtype=torch.bool), 0)

    def test_a_value_read_by_the_host(self, device):
        lse = torch.zeros(4, device=DEVICE)
        with pytest.raises(RuntimeError, match="_local_scalar_dense"):
            bool((lse == 0).all())

    def test_a_launch_on_another_device(self, device, monkeypatch):
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        x = draw(4, 4)
        with pytest.raises(AssertionError, match="on cuda:1 in a launch on cuda:0"):
            triton_merge.merge_(SoftmaxState.empty(x.q), 0, 4, x.q, x.q[:, :, 0])

    def test_a_kernel_given_wrong_strides(self, device):
        state = SoftmaxState.empty(draw(4, 4).q)
        out = draw(4, 4).q.transpose(0, 2).contiguous().transpose(0, 2)
        with pytest.raises(AssertionError, match=r"block_out_ptr.*read by"):
            triton_merge.merge_(state, 0, 4, out, torch.zeros(4, 4, device=DEVICE))
