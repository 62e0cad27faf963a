"""``anchorcontext parity`` as users start it."""

import json
import subprocess
import sys

import pytest

from anchorcontext.cli.parity import one_step
from anchorcontext.testing.distributed import free_port

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")


def test_command_under_torchrun(config_file, tmp_path):
    report = tmp_path / "report.json"
    done = subprocess.run(
        [*TORCHRUN, "--master-port", str(free_port()), "-m", "anchorcontext", "parity",
         str(config_file()), "train.zero_stage=3", "--windows", "1", "--worst", "2",
         "--json", str(report)],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "parity: dp 1 x sp 2, ZeRO-3, fp32" in done.stdout
    assert "single device: 1 window, 64 tokens, 21 gradients: within tolerance" in done.stdout
    assert done.stdout.count("gradient model.") + done.stdout.count("gradient lm_head") == 4
    found = json.loads(report.read_text())
    assert found["passed"]
    stock, single = found["comparisons"]
    assert stock["baseline"] == "stock transformers"
    assert (stock["num_tokens"], single["num_tokens"]) == (40, 64)
    assert len(stock["gradients"]) == len(single["gradients"]) == 21
    assert single["logits"]["num_tokens"] == 64


@pytest.mark.parametrize(
    ("accumulation", "asked", "windows"), [(1, None, 2), (2, None, 4), (8, None, 4), (8, 6, 6)]
)
def test_windows_of_the_compared_step(accumulation, asked, windows, make_config, monkeypatch):
    """dp = 2: one micro-batch, or two when training accumulates; or what is asked for."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    config = make_config(train={"windows_per_step": 2 * accumulation})
    step = one_step(config, asked)
    assert step.train.windows_per_step == windows
    assert config.train.windows_per_step == 2 * accumulation
