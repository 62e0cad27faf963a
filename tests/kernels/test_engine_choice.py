"""Choosing an engine by name or by capability."""

from __future__ import annotations

import logging

import pytest
import torch

from anchorcontext import kernels
from anchorcontext.errors import UserError
from anchorcontext.kernels import get_engine

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_an_engine_is_chosen_by_name(name):
    assert get_engine(name, device=CPU, dtype=torch.float32).name == name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_auto_takes_the_flash_operator_on_the_cpu(dtype):
    assert get_engine(device=CPU, dtype=dtype).name == "cpu"


def test_auto_logs_once_what_it_passed_over_and_why(caplog):
    kernels._choose.cache_clear()
    with caplog.at_level(logging.INFO, logger="anchorcontext"):
        for _ in range(3):
            assert get_engine("auto", device=CUDA, dtype=torch.float32).name == "reference"
    assert len(caplog.records) == 1
    assert "not 'cpu': it runs on cpu tensors" in caplog.text


def test_an_unknown_engine_names_the_nearest():
    with pytest.raises(UserError, match=r"'referense'.*one of auto.*did you mean 'reference'"):
        get_engine("referense", device=CPU, dtype=torch.float32)


def test_an_engine_that_cannot_serve_says_why_and_what_can():
    with pytest.raises(UserError, match=r"'cpu' cannot serve torch.float32 on cuda.*reference"):
        get_engine("cpu", device=CUDA, dtype=torch.float32)


@pytest.mark.parametrize("name", ["auto", "cpu", "reference"])
def test_integers_are_refused(name):
    with pytest.raises(UserError, match="floating-point"):
        get_engine(name, device=CPU, dtype=torch.int64)


def test_an_engine_joins_with_one_line(monkeypatch):
    monkeypatch.setitem(kernels.ENGINES, "dense", ".reference:ReferenceEngine")
    assert get_engine("dense", device=CPU, dtype=torch.float32).name == "reference"


def test_an_engine_without_an_exact_setting_is_refused_for_exact_tiles():
    assert get_engine(device=CPU, dtype=torch.float32, exact=True).name == "cpu"
    with pytest.raises(UserError, match=r"'reference' .* has no exact setting; use 'auto' or cpu"):
        get_engine("reference", device=CPU, dtype=torch.float32, exact=True)


def test_an_engine_that_cannot_rotate_is_given_rotated_copies():
    engine = get_engine(device=CPU, dtype=torch.bfloat16, rotates=True)
    assert engine.name == "cpu" and engine.takes_rotation and engine.takes_anchors
    assert get_engine(device=CPU, dtype=torch.bfloat16, rotates=True, exact=True).exact
    assert not get_engine(device=CPU, dtype=torch.bfloat16).takes_rotation


def on_a_gpu(monkeypatch):
    """Every engine of ours serves, as on an H100 with flash-attn."""
    serves = {
        "flash_attn": (torch.bfloat16,),
        "flex": (torch.bfloat16, torch.float32),
        "triton": (torch.bfloat16, torch.float32),
    }
    for name, dtypes in serves.items():
        kind = kernels._engine_class(name)
        reason = staticmethod(lambda _, dtype, d=dtypes: None if dtype in d else f"not {dtype}")
        monkeypatch.setattr(kind, "why_not", reason)
    kernels._choose.cache_clear()


def test_auto_prefers_an_engine_that_rotates_in_its_kernel(monkeypatch):
    on_a_gpu(monkeypatch)
    assert get_engine(device=CUDA, dtype=torch.bfloat16).name == "flash_attn"
    assert get_engine(device=CUDA, dtype=torch.bfloat16, rotates=True).name == "triton"
    with pytest.raises(UserError, match=r"rotated to torch.float32, and not torch.float32; use"):
        get_engine("flash_attn", device=CUDA, dtype=torch.bfloat16, rotates=True)
    kernels._choose.cache_clear()
