"""The benchmark of modes: pairs are exact, and what is asked wrongly is named."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from anchorcontext.bench.modes import bench_modes
from anchorcontext.cli.bench import command
from anchorcontext.plan.mixes import mix_lengths


def test_pairs_are_those_of_the_documents():
    results = bench_modes(
        window_tokens=300,
        mix="short",
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
        repeats=1,
    )
    lengths = mix_lengths("short", 299)
    inside = int((lengths * (lengths + 1) // 2).sum()) + 1
    found = {result.mode: result for result in results}
    full = 300 * 301 // 2
    assert found["full"].pairs_of_full == found["full"].time_of_full == 1.0
    assert found["intra_doc"].pairs_of_full == pytest.approx(inside / full)
    assert found["anchor"].pairs_of_full == pytest.approx((inside + 299) / full)
    assert all(np.isfinite(result.efficiency) for result in results)


def test_the_command_writes_its_section(tmp_path):
    page = tmp_path / "benchmarks.md"
    arguments = ["modes", "--window", "200", "--heads", "2/1", "--head-dim", "8", "--repeats", "1"]
    outcome = CliRunner().invoke(command, [*arguments, "--markdown", str(page)])
    assert outcome.exit_code == 0, outcome.output
    assert "<!-- begin modes -->" in page.read_text() and "| anchor |" in page.read_text()


@pytest.mark.parametrize("heads", ["8", "8/0", "8/3", "a/b"])
def test_heads_that_make_no_sense_are_named(heads):
    outcome = CliRunner().invoke(command, ["modes", "--heads", heads])
    assert outcome.exit_code == 2
