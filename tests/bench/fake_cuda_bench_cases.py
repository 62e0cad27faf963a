"""Timing on CUDA tensors without values: between two events the host waits for nothing.

Run by tests/test_fake_cuda.py.
"""

from __future__ import annotations

import pytest
import torch

from anchorcontext.bench import kernels
from anchorcontext.testing.fake_cuda import fake_cuda

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("mode", kernels.MODES)
def test_engines_are_timed_in_calls_that_do_not_wait(monkeypatch, mode):
    """torch's own attention chooses its kernel by the device, so that here a stand-in is timed."""
    monkeypatch.setattr(kernels, "causal_call", lambda q, k, v: q * (k.sum() + v.sum()))
    monkeypatch.setattr(kernels, "_MOST_CALLS", 3)
    with fake_cuda() as device:
        results = kernels.bench_kernels(
            lengths=[300], device=CUDA, dtype=torch.bfloat16, heads=(4, 2), head_dim=16,
            modes=[mode], engines=["varlen", "triton"], repeats=1,
        )  # fmt: skip
    contestants = ["varlen", "triton", kernels.YARDSTICK]
    contestants += [kernels.PER_DOCUMENT] * (mode == "intra_doc")
    assert sorted(result.contestant for result in results) == sorted(contestants)
    assert {result.forward_seconds for result in results} == {1e-3 / 3}, "means over the calls"
    assert "dkdv_kernel" in {launch.kernel for launch in device.launches}
