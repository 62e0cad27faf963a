"""The Triton engine among the others: where it serves, what it says is missing, the tables."""

from __future__ import annotations

import importlib
import itertools
import logging

import pytest
import torch

from anchorcontext import kernels
from anchorcontext.errors import UserError
from anchorcontext.kernels import engine_report, get_engine, merge, triton_config, triton_engine
from anchorcontext.kernels.triton_engine import TritonEngine

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(triton_engine, "_interpreted", lambda: True)


def test_cpu_tensors_need_the_interpreter(monkeypatch):
    monkeypatch.setattr(triton_engine, "_interpreted", lambda: False)
    with pytest.raises(
        UserError, match=r"'triton' .* only runs interpreted \(set TRITON_INTERPRET"
    ):
        get_engine("triton", device=CPU, dtype=torch.float32)


def test_auto_never_takes_the_interpreter(interpreted, monkeypatch, caplog):
    some = {name: kernels.ENGINES[name] for name in ("triton", "reference")}
    monkeypatch.setattr(kernels, "ENGINES", some)
    assert engine_report(CPU, torch.float32)["triton"] is None
    kernels._choose.cache_clear()
    with caplog.at_level(logging.INFO, logger="anchorcontext"):
        assert get_engine(device=CPU, dtype=torch.float32).name == "reference"
    kernels._choose.cache_clear()
    assert "not 'triton': on cpu tensors it is chosen by name only" in caplog.text


def test_a_missing_triton_is_named_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr(triton_engine.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'triton>=3.6'" in TritonEngine.why_not(CUDA, torch.float32)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)])
def test_devices_from_ampere_on_are_served(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    reason = TritonEngine.why_not(CUDA, torch.bfloat16)
    assert (reason is None) == (capability >= (8, 0)), reason


def test_every_kernel_and_head_dimension_has_block_sizes():
    kinds = itertools.product(
        triton_config.KERNELS,
        (8, 64, 96, 128, 256),
        (torch.float32, torch.bfloat16, torch.float16),
        (False, True),
        ((8, 0), (9, 0), (10, 0)),
    )
    for kernel, head_dim, dtype, rope, capability in kinds:
        options = triton_config.candidates(kernel, head_dim, dtype, rope, capability)
        assert len(set(options)) == len(options) >= 1
        for config in options:
            assert config.block_m >= 16 and config.block_n >= 16 and config.num_warps in (4, 8)


def test_the_fastest_configuration_is_measured_once_and_one_that_does_not_fit_is_passed_over():
    from triton.runtime.errors import OutOfResources, PTXASError

    seconds = {1: 3.0, 2: 1.0, 3: 2.0}
    options = tuple(triton_config.Config(16 * n, 16, 4, 1) for n in (1, 2, 3, 4, 5))
    asked = []

    def measure(config):
        asked.append(config)
        if config == options[3]:
            raise OutOfResources(300_000, 232_448, "shared memory")
        if config == options[4]:
            raise PTXASError("no registers left")
        return seconds[config.block_m // 16]

    for _ in range(2):
        assert triton_config.tuned(("a test",), options, measure) == options[1]
    assert asked == list(options)


def test_merges_on_the_cpu_and_in_fp64_stay_in_torch():
    assert merge._fused(torch.zeros(1, 1, 8)) is None
    assert merge._fused(torch.zeros(1, 1, 8, dtype=torch.float64)) is None


def test_merges_are_left_to_torch_where_triton_cannot_compile(monkeypatch, caplog):
    """It needs a C compiler; here it lacks a GPU."""
    merge._fused_kernels.cache_clear()
    triton_merge = importlib.import_module("anchorcontext.kernels.triton_merge")
    monkeypatch.setattr(triton_merge, "merge_", lambda *args: None)
    assert merge._fused_kernels(CPU) is triton_merge

    def fail(*args):
        raise RuntimeError("Failed to find C compiler")

    merge._fused_kernels.cache_clear()
    monkeypatch.setattr(triton_merge, "merge_", fail)
    with caplog.at_level(logging.WARNING, logger="anchorcontext"):
        assert merge._fused_kernels(CPU) is None and merge._fused_kernels(CPU) is None
    merge._fused_kernels.cache_clear()
    assert caplog.text.count("run in torch, Triton's kernels do not: Failed to find C comp") == 1
