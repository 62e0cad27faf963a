"""Every file of configs/controls/ trains a step on two ranks, on a tiny model and windows."""

from __future__ import annotations

import gc
import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from anchorcontext.cli import group
from anchorcontext.config import load_config
from anchorcontext.testing import run_distributed

CONTROLS = sorted((Path(__file__).parents[2] / "configs" / "controls").glob("*.yaml"))
TINY = (
    "model={dtype: bf16, scratch: {model_type: llama, hidden_size: 32, intermediate_size: 64, "
    "num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2}}",
    "parallel={sp: 2, hardware: cpu}",
    "train={steps: 1, windows_per_step: 2}",
    "checkpoint={}",
)


def overrides(path, prepared):
    data = f"data={{path: {prepared}, tokenizer: none, window_tokens: 24}}"
    # The tiny vocabulary ends before LLaMA-3's "hello".
    token = ["attention.anchor.token=7"] if path.stem == "does_the_anchor_need_to_be_a_bos" else []
    return [*TINY, data, *token]


def one_step(rank, world, configs):
    """The gradient norm of every run's first step."""
    from anchorcontext.train.job import Job
    from anchorcontext.train.step import count_targets, plan_micro_batches, train_step
    from anchorcontext.watch.metrics import StepMeter

    found = {}
    for name, config in configs.items():
        gc.freeze()  # DeepSpeed collects garbage six times a start, 0.3 s each with all of torch
        job = Job(config)
        windows = job.next_micro_batches()
        plans = plan_micro_batches(windows, job.mesh, config.attention, job.control, job.cost)
        targets = count_targets(windows, job.mesh, job.control)
        outcome = train_step(job.engine, plans, targets, StepMeter(job.device))
        assert outcome.skip_reason is None, name
        found[name] = outcome.grad_norm
        job.loader.close()
        job.engine.destroy()
    return found


@pytest.fixture(scope="module")
def norms(prepared):
    configs = {p.stem: load_config(p, overrides(p, prepared)) for p in CONTROLS}
    return run_distributed(one_step, 2, configs, timeout=280, group_timeout=120)[0]


def test_every_control_trains(norms):
    assert norms.keys() == {path.stem for path in CONTROLS}
    assert all(math.isfinite(norm) and norm > 0 for norm in norms.values())


CLAMPED, SHIFTED = {"clamp_first": True}, {"offset": 65536}
HIDDEN = {"anchor": False, "hidden_anchor": True}
SEEN = {
    "does_the_anchor_need_to_be_seen": HIDDEN,
    "does_the_anchor_need_position_zero": {"anchor_position": 4096},
    "does_resetting_positions_help_behind_an_anchor": {"reset_positions": True},
    "does_clamping_the_first_position_suffice": CLAMPED,
    "does_clamping_replace_the_anchor": CLAMPED,
    "does_shifting_all_positions_matter": SHIFTED,
}


@pytest.mark.parametrize("path", CONTROLS, ids=lambda path: path.stem)
def test_inspect_shows_the_control(path, prepared, tmp_path):
    given = overrides(path, prepared)
    arguments = ["inspect", str(path), *given, "--json", str(tmp_path / "found.json")]
    result = CliRunner().invoke(group, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["controls"] == SEEN.get(path.stem, {})
    copies = [row["name"] for row in found["documents"]].count("copy of the anchor")
    assert copies == (4 if path.stem == "is_a_copy_in_every_document_the_same" else 0)
    precision = load_config(path, given).attention.precision.model_dump()
    expected = {part: dtype.replace("model", "bf16") for part, dtype in precision.items()}
    if expected["rotation"] == "engine":
        expected |= dict.fromkeys(("rotation", "qk"), "fp32 in the engine")
    assert found["precision"] == expected
    assert ("the anchor is token id 7" in result.output) == (path.stem.endswith("be_a_bos"))
