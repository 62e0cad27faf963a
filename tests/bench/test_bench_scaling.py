"""``bench step`` and ``bench growth``: several ranks against one process, on tiny sizes."""

from __future__ import annotations

import json
from operator import itemgetter

import pytest
from click.testing import CliRunner

from anchorcontext.bench.jobs import Job
from anchorcontext.cli import group
from anchorcontext.errors import UserError
from anchorcontext.hardware import load_hardware

TINY = """
model:
  dtype: fp32
  scratch: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1,
            num_attention_heads: 2, num_key_value_heads: 1}
data:
  path: nowhere
  sources: [{kind: stdlib}]
  train_tokenizer: {vocab_size: 300}
  window_tokens: 512
train: {steps: 10, windows_per_step: 1}
parallel: {sp: 2}
"""


def run(*arguments):
    result = CliRunner().invoke(group, ["bench", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_step_on_two_ranks_against_one_process(tmp_path):
    config, page, report = (tmp_path / name for name in ("config.yaml", "page.md", "report.json"))
    config.write_text(TINY)
    options = ("--mix", "short", "--repeats", 1, "--markdown", page, "--json", report)
    output = run("step", config, *options)
    assert "2 ranks over one process" in output
    found = json.loads(report.read_text())
    pair = found["pairs"][0]
    assert found["ratio"] == pytest.approx(pair["split"]["total"] / pair["alone"]["total"])
    assert pair["bytes_sent"] > 0, "ranks share the window"
    for side in ("split", "alone"):
        parts = {name: seconds for name, seconds in pair[side].items() if name != "total"}
        assert sum(parts.values()) == pytest.approx(pair[side]["total"])
        assert all(seconds >= 0 for seconds in parts.values())
    assert pair["alone"]["exchange"] == 0
    assert "<!-- begin step -->" in page.read_text()


def test_one_rank_has_nothing_to_be_compared_with(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(TINY)
    result = CliRunner().invoke(group, ["bench", "step", str(config), "parallel.sp=1"])
    assert result.exit_code == 2 and "parallel.sp=2" in result.output


def test_growth_of_time_and_memory(tmp_path):
    page, report = tmp_path / "page.md", tmp_path / "report.json"
    options = ("--windows", "2048,4096", "--sp", "1,2", "--head-dim", 16, "--mix", "short")
    run("growth", *options, "--markdown", page, "--json", report)
    found = {(r["mode"], r["window_tokens"], r["sp"]): r for r in json.loads(report.read_text())}
    assert len(found) == 8
    for mode in ("full", "anchor"):
        for sp in (1, 2):
            short, long = found[mode, 2048, sp], found[mode, 4096, sp]
            assert short["peak_bytes"] > 0 and short["seconds"] > 0
            assert short["flops"] == found[mode, 2048, 1]["flops"], "ranks share the pairs"
            assert long["flops"] > 1.9 * short["flops"]
    full = 14 * 16 * 2048 * 2049 // 2
    assert found["full", 2048, 1]["flops"] == full
    assert (tmp_path / "growth.png").stat().st_size > 10_000
    assert "(growth.png)" in page.read_text() and "| full (ring) | 2,048 |" in page.read_text()


@pytest.mark.parametrize("sizes", ["0", "a", "1,,2"])
def test_ranks_that_make_no_sense_are_named(sizes):
    result = CliRunner().invoke(group, ["bench", "growth", "--sp", sizes])
    assert result.exit_code == 2 and "--sp" in result.output


def test_a_job_answers_and_passes_on_what_its_ranks_raise():
    with Job(itemgetter, 2, 1, 1) as job:
        assert job.run("ab") == ["b", "b"] and job.run("cd") == ["d", "d"]
        with pytest.raises(RuntimeError, match=r"rank 0 of 2 failed:(.|\n)*IndexError"):
            job.run("a")
    with Job(load_hardware, 1, 1, "no such machine") as job, pytest.raises(UserError):
        job.run(None)
