"""Calibration: fits find what was put in, links are timed on real ranks, the profile is usable."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from anchorcontext.bench.calibrate import Settings, calibrate, measure_attention
from anchorcontext.bench.fit import fit_costs
from anchorcontext.bench.links import measure_link
from anchorcontext.cli import group
from anchorcontext.errors import UserError
from anchorcontext.hardware import load_hardware, profile_text
from anchorcontext.testing import run_distributed

CPU = torch.device("cpu")
SMALL = Settings(
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    hidden_size=64,
    attention_tokens=256,
    document_lengths=(8, 32, 128, 256),
    linear_tokens=(16, 64, 256),
    square=64,
    copy_bytes=1 << 20,
    ranks=1,
    repeats=1,
)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr("anchorcontext.bench.calibrate.LEAST_SECONDS", 0.02)


def test_a_fit_finds_the_costs_that_were_put_in():
    amounts = np.array([[1, 4, 100], [1, 16, 400], [1, 64, 1e4], [1, 1, 1e6]])
    fit = fit_costs(amounts, amounts @ [2e-5, 3e-6, 1e-9])
    np.testing.assert_allclose(fit.costs, [2e-5, 3e-6, 1e-9], rtol=1e-9)
    assert fit.residual < 1e-9


def test_no_cost_is_negative_and_the_residual_says_what_is_missing():
    fit = fit_costs(np.array([[1, 1], [1, 2], [1, 4]]), np.array([1.0, 3.0, 7.0]))
    assert fit.costs[0] == 0 and 1 < fit.costs[1] < 1.75
    errors = np.array([1, 2, 4]) * fit.costs[1] / [1, 3, 7] - 1
    assert fit.residual == pytest.approx(np.sqrt(np.mean(errors**2)))


def test_the_last_cost_is_positive_whatever_the_noise():
    """Longer took less time: the constant is left out, not the rate."""
    fit = fit_costs(np.array([[1, 10, 100], [1, 20, 200], [1, 10, 400]]), np.array([3.0, 2.9, 2.8]))
    assert fit.costs[2] > 0 and min(fit.costs) >= 0


def test_short_times_count_as_much_as_long_ones():
    """An absolute fit would sacrifice the first two times to the last one's 10 % of noise."""
    sizes = np.array([1.0, 10.0, 1e6])
    fit = fit_costs(np.stack([np.ones(3), sizes], axis=1), np.array([11.0, 20.0, 1.1e6]))
    assert fit.costs[0] == pytest.approx(10, rel=0.1)


def shifted(rank, world_size):
    return measure_link(1, CPU, sizes=(1 << 10, 1 << 16, 1 << 20), repeats=2)


def test_a_link_between_ranks_is_the_same_figure_on_all_of_them():
    first, second = run_distributed(shifted, 2)
    assert first == second
    assert 1e6 < first.bytes_per_second < 1e12 and first.seconds_per_message < 1


def test_what_is_measured_replaces_the_bases_figures_and_the_rest_is_kept():
    base = load_hardware("h100")
    found = calibrate(base, SMALL, CPU, "mine")
    hardware = found.hardware
    assert (hardware.name, hardware.kind) == ("mine", "cpu")
    assert found.kept == [
        "node_bytes_per_second",
        "network_bytes_per_second",
        "seconds_per_message",
    ]
    assert all(getattr(hardware, key) == getattr(base, key) for key in found.kept)
    assert hardware.peak_fp32_flops < 1e12 and 0 < hardware.compute_fraction <= 1
    assert 0 < hardware.attention_fraction <= 1 and hardware.seconds_per_tile >= 0
    assert "not measured, from h100" in found.remarks["network_bytes_per_second"]
    assert {item.key for item in found.measured} | set(found.kept) == set(found.remarks)


def test_attention_is_measured_over_the_plans_tiles():
    rate, per_tile, fit = measure_attention(SMALL, CPU)
    assert rate > 0 and per_tile == fit.costs[1] >= 0


@pytest.mark.parametrize("name", ["h100", "cpu"])
def test_a_profile_reads_back_as_it_was_written(name, tmp_path):
    path = tmp_path / f"{name}.yaml"
    hardware = replace(load_hardware(name), attention_fraction=0.25, seconds_per_tile=2e-5)
    path.write_text(profile_text(hardware, {"kind": "told"}, "Two\nlines"))
    assert path.read_text().startswith("# Two\n# lines\nkind: ")
    assert load_hardware(str(path)) == hardware
    path.write_text(path.read_text().replace("attention_fraction: 0.25", "attention_fraction: 2"))
    with pytest.raises(UserError, match="attention_fraction = 2"):
        load_hardware(str(path))


def bench(*arguments):
    return CliRunner().invoke(group, ["bench", "calibrate", *map(str, arguments)])


def test_the_command_starts_its_own_ranks_and_writes_a_profile_the_config_can_name(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("anchorcontext.bench.calibrate.Settings", lambda: replace(SMALL, ranks=2))
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv(variable, "")  # start_process sets them; monkeypatch restores
        monkeypatch.delenv(variable)
    profile, report = tmp_path / "machine.yaml", tmp_path / "found.json"
    result = bench(profile, "--json", report)
    assert result.exit_code == 0, result.output
    for text in (
        "fit's residual",
        "node link",
        "network_bytes_per_second = 1.25e+08: not measured",
    ):
        assert text in result.output
    hardware = load_hardware(str(profile))
    assert hardware.name == "machine" and hardware.kind == "cpu"
    found = json.loads(report.read_text())
    assert found["hardware"]["node_bytes_per_second"] == pytest.approx(
        hardware.node_bytes_per_second, rel=1e-3
    )
    assert found["kept"] == ["network_bytes_per_second"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mine.txt"], "ends in .yaml"),
        (["mine.yaml", "--base", "h10"], "did you mean 'h100'"),
        (["mine.yaml", "--heads", "8"], "give query/key heads"),
    ],
)
def test_mistakes_are_named(arguments, message, tmp_path):
    result = bench(tmp_path / arguments[0], *arguments[1:])
    assert result.exit_code == 2 and message in result.output
