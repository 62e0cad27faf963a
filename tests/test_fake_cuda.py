"""Runs ``fake_cuda_*_cases.py`` of all folders in a process whose torch has CUDA devices without
memory: where a GPU would fail, or make the host wait, they fail (anchorcontext.testing.fake_cuda).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from anchorcontext.testing import fake_cuda

HERE = Path(__file__).parent
CASES = sorted(HERE.glob("*/fake_cuda_*_cases.py"))
MIN_TESTS = 70


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_on_cuda_tensors_without_values():
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, fake_cuda.__file__, *map(str, CASES)],
        cwd=HERE.parent,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=590,
    )
    if run.returncode == fake_cuda.NO_FAKE_CUDA:
        pytest.skip(run.stdout.strip())
    assert run.returncode == 0, run.stdout + run.stderr
    summary = run.stdout.strip().splitlines()[-1]
    assert int(summary.split()[0]) >= MIN_TESTS, summary
    assert "skipped" not in summary


def test_every_layer_has_cases():
    assert {path.parent.name for path in CASES} == {"bench", "kernels", "model", "parallel"}
