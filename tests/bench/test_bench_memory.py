"""``bench memory``: the levers are those of the config, and a row measures what is predicted."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner

from anchorcontext.bench import memory
from anchorcontext.cli import group
from anchorcontext.config import load_config


@pytest.fixture
def demo(request):
    return request.config.rootpath / "configs" / "demo.yaml"


def test_each_row_differs_from_the_base_by_its_keys(demo):
    rows = memory.lever_rows(load_config(demo, []), chunk_tokens=4096)
    base = rows["loss.chunk_tokens: 1024"]
    assert not base.model.gradient_checkpointing and base.parallel.sp == 1
    for levers, config in rows.items():
        for key in ("gradient_checkpointing", "keep_attention", "offload_activations"):
            assert getattr(config.model, key) == (key in levers), levers
        assert config.model.checkpoint_every == (2 if "checkpoint_every: 2" in levers else 1)
        chunk = 4096 if "mlp_chunk_tokens" in levers else None
        assert config.model.mlp_chunk_tokens == chunk
        offloaded = "cpu" if "offload_optimizer" in levers else "none"
        assert config.train.offload_optimizer == offloaded
        assert config.loss.chunk_tokens == (65536 if levers.startswith("none") else 1024)


def test_every_lever_lowers_what_it_is_for(demo):
    rows = memory.lever_rows(load_config(demo, []), chunk_tokens=4096)
    peaks = {name: memory.predicted_peak(row, on_cpu=False) for name, row in rows.items()}
    whole, base, *others = peaks.values()
    assert base < whole and all(peak < base for peak in others)
    kept = "+ gradient_checkpointing, keep_attention"
    assert peaks["+ gradient_checkpointing"] < peaks[kept] < base


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_a_measured_row_is_what_the_estimate_says(demo, tmp_path, monkeypatch):
    whole = memory.lever_rows
    monkeypatch.setattr(memory, "lever_rows", lambda *args: dict([list(whole(*args).items())[2]]))
    page, report = tmp_path / "page.md", tmp_path / "report.json"
    arguments = ["bench", "memory", str(demo), "data.window_tokens=8192", "--chunk-tokens", "1024"]
    result = CliRunner().invoke(group, [*arguments, "--markdown", str(page), "--json", str(report)])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(report.read_text())
    assert row["measured"] / row["predicted"] == pytest.approx(1, abs=0.2)
    text = page.read_text()
    assert "| + mlp_chunk_tokens |" in text
    assert f"anchorcontext bench memory {demo} data.window_tokens=8192 --mix" in text
