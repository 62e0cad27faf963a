"""Runs the Triton kernels' tests, ``triton_*_cases.py``, in processes with Triton's interpreter on.

The interpreter must be on before Triton is imported, and other tests of this session may have
imported it. By hand, from the repository's root::

    TRITON_INTERPRET=1 python -m pytest tests/kernels/triton_attention_cases.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CASES = sorted(HERE.glob("triton_*_cases.py"))
MIN_TESTS = {"triton_attention_cases.py": 43, "triton_merge_cases.py": 20}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_kernels_under_the_interpreter(path):
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(path)],
        cwd=HERE.parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=590,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    summary = run.stdout.strip().splitlines()[-1]
    assert int(summary.split()[0]) >= MIN_TESTS[path.name], summary
    assert "skipped" not in summary


def test_every_file_of_cases_is_known():
    assert {path.name for path in CASES} == set(MIN_TESTS)
