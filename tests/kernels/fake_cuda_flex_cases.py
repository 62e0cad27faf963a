"""FlexAttention compiled for Hopper without one: torch traces the engine's calls, writes Triton
kernels for the mask, and Triton compiles them; only their launches are left out.

Run by tests/test_fake_cuda.py.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch._inductor.config as inductor_config
import triton
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver

from anchorcontext.kernels import AnchorKeys, SoftmaxState, Tiles
from anchorcontext.kernels.aot import SHARED_LIMIT
from anchorcontext.kernels.flex import FlexEngine, _compiled
from anchorcontext.testing.fake_cuda import fake_cuda

CUDA = torch.device("cuda", 0)
H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, gcnArchName="",
    max_threads_per_block=1024, shared_memory_per_block=48 * 1024,
    shared_memory_per_block_optin=227 * 1024, shared_memory_per_multiprocessor=228 * 1024,
)  # fmt: skip


class Driver:
    """What Triton asks of a GPU to compile for it."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_active_torch_device(self):
        return CUDA

    def get_device_interface(self):
        return torch.cuda


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """The kernels that are compiled, on a Hopper GPU whose launches do nothing."""
    kernels = []
    real = triton.compile

    def compile_and_keep(source, *args, **kwargs):
        kernels.append(real(source, *args, **kwargs))
        return kernels[-1]

    def not_loaded(kernel):
        kernel.module = kernel.function = 0
        kernel.n_regs = kernel.n_spills = 0
        kernel.n_max_threads = 1024
        kernel._run = lambda *args, **kwargs: None

    def empty(size, stride, dtype):
        return torch.empty_strided(size, stride, dtype=dtype, device=CUDA)

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_cuda(watch=False))
        for target, name, value in (
            (FakeTensorMode, "avoid_device_init", property(lambda mode: True)),
            (torch.cuda, "_lazy_init", lambda: None),
            (torch.cuda, "_get_device_properties", lambda device: H200),
            (torch.cuda, "get_rng_state", lambda *args: torch.zeros(1)),
            (torch.cuda, "set_device", lambda index: None),
            (torch.cuda, "_exchange_device", lambda index: 0),
            (torch.cuda, "_maybe_exchange_device", lambda index: 0),
            (CudaInterface, "exchange_device", staticmethod(lambda index: 0)),
            (CudaInterface, "maybe_exchange_device", staticmethod(lambda index: 0)),
            (triton_helpers, "set_driver_to_gpu", lambda: None),
            (triton_heuristics.triton, "compile", compile_and_keep),
            (triton_heuristics.CachingAutotuner, "run", lambda *args, **kwargs: None),
            (CompiledKernel, "_init_handles", not_loaded),
            (driver, "_active", Driver()),
            (torch._C, "_cuda_getCurrentRawStream", lambda device: 0),
            (torch._C._dynamo.guards, "_empty_strided_cuda", empty),
        ):
            stack.enter_context(mock.patch.object(target, name, value, create=True))
        stack.enter_context(
            inductor_config.patch(
                compile_threads=1, fx_graph_cache=False, use_static_triton_launcher=False
            )
        )
        _compiled.cache_clear()
        torch._dynamo.reset()
        yield kernels
    _compiled.cache_clear()
    torch._dynamo.reset()


def test_forward_and_backward_compile_for_hopper(compiled):
    """Documents and an anchor, 4 query heads a key head, head dimension 128."""
    tiles = Tiles(np.array([(0, 300, 0, 300, 1), (300, 1000, 300, 1000, 1)]))

    def draw(*shape):
        return torch.randn(*shape, 128, device=CUDA, dtype=torch.bfloat16)

    q, k, v, anchor = draw(1000, 8), draw(1000, 2), draw(1000, 2), draw(1, 2, 2)
    anchors = AnchorKeys(anchor, np.array([[0, 300, 1000]]))
    sums = [torch.zeros(x.shape, device=CUDA) for x in (q, k, v, anchor)]
    engine, state = FlexEngine(), SoftmaxState.empty(q)
    engine.forward(q, k, v, tiles, 0.1, state, anchors)
    out = state.out.to(q.dtype)
    engine.backward(q, q, k, v, out, state.lse, tiles, 0.1, *sums[:3], anchors, sums[3])
    templates = [kernel for kernel in compiled if "tem_fused_flex" in kernel.metadata.name]
    assert {"backward" in kernel.metadata.name for kernel in templates} == {False, True}
    for kernel in templates:
        assert kernel.metadata.shared <= SHARED_LIMIT[90], kernel.metadata.name
        assert "wgmma" in kernel.asm["ptx"], kernel.metadata.name
