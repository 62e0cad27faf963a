"""Simulated formats are torch's casts; positions collapse where hazard 23 says."""

from __future__ import annotations

import pytest
import torch

from anchorcontext.errors import UserError
from anchorcontext.precision.rope.formats import FORMATS, check_format, lost_positions, round_to


def numbers() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4096, dtype=torch.float64, generator=generator) * 40


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_plain_formats_are_torchs_casts(name: str) -> None:
    x = numbers()
    rounded = round_to(x, name)
    assert rounded.dtype == torch.float64
    assert torch.equal(rounded, x.to(FORMATS[name]).double())
    assert not torch.equal(rounded, x)
    assert torch.equal(round_to(rounded, name), rounded)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("power", [-20, 0, 9])
def test_fp8_is_torchs_cast_of_a_scaled_tensor(name: str, power: int) -> None:
    x = numbers() * 2.0**power
    dtype = FORMATS[name]
    most = torch.finfo(dtype).max
    rounded = round_to(x, name)
    # Some power of two fits the largest entry; the next one does not.
    fits = [e for e in range(-60, 60) if x.abs().max() * 2.0**e <= most]
    scale = 2.0 ** max(fits)
    assert torch.equal(rounded, (x * scale).float().to(dtype).double() / scale)
    assert (rounded - x).abs().max() <= x.abs().max() * (1 / 8 if name == "fp8_e5m2" else 1 / 16)


def test_fp8_keeps_hidden_scores_and_zeros() -> None:
    x = torch.tensor([1.0, -torch.inf, 0.0, 3.0], dtype=torch.float64)
    assert round_to(x, "fp8_e4m3").tolist() == [1.0, -torch.inf, 0.0, 3.0]
    assert round_to(torch.zeros(3), "fp8_e4m3").tolist() == [0.0] * 3


def test_a_wider_format_changes_nothing() -> None:
    x = numbers()
    assert round_to(x, "fp64") is x
    assert torch.equal(round_to(x.float(), "fp32"), x.float())


@pytest.mark.parametrize(
    ("name", "count", "first", "left"),
    [
        ("bf16", 4096, 257, 769),
        ("bf16", 131_072, 257, 1409),
        ("fp16", 4096, 2049, 3073),
        ("fp8_e4m3", 4096, 17, 55),
        ("fp32", 131_072, None, 131_072),
    ],
)
def test_positions_that_are_lost(name: str, count: int, first: int | None, left: int) -> None:
    assert lost_positions(name, count) == (first, left)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(UserError, match=r"'int4'.*fp8_e5m2"):
        check_format("int4")
