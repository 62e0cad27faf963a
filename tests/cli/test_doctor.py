"""``anchorcontext doctor``: what it finds, and that it says what is missing."""

from __future__ import annotations

import importlib.metadata
import json

import pytest
from click.testing import CliRunner

from anchorcontext.cli.doctor import command
from anchorcontext.environment import PackageState


def test_reports_engines_and_packages(tmp_path):
    path = tmp_path / "doctor.json"
    result = CliRunner().invoke(command, ["--json", str(path)])
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    engines = {(e["name"], e["dtype"]): e for e in found["engines"] if e["device"] == "cpu"}
    assert engines["cpu", "bfloat16"]["chosen"] and engines["cpu", "bfloat16"]["reason"] is None
    assert "not on cpu" in engines["varlen", "float32"]["reason"]
    packages = {(p["name"], p["extra"]): p for p in found["packages"]}
    assert packages["torch", ""]["installed"] == importlib.metadata.version("torch")
    assert ("pytest", "dev") in packages


@pytest.mark.parametrize(
    ("state", "fits", "advice"),
    [
        (PackageState("torch", ">=2.11", "", "2.13.0+cpu"), True, ""),
        (PackageState("torch", ">=2.11", "", "2.10"), False, "pip install 'torch>=2.11'"),
        (PackageState("torch", ">=2.11", "", None), False, "pip install 'torch>=2.11'"),
        (PackageState("nltk", ">=3.9", "eval", None), True, "pip install 'anchorcontext[eval]'"),
        (PackageState("nltk", ">=3.9", "eval", "3.8"), False, "pip install 'anchorcontext[eval]'"),
        (PackageState("x", "", "", "0"), True, ""),
    ],
)
def test_a_package_fits_or_says_how_to_mend_it(state, fits, advice):
    assert (state.fits, state.advice) == (fits, advice)


def test_a_missing_package_is_an_exit_status(monkeypatch):
    real = importlib.metadata.version

    def version(name):
        if name == "pyarrow":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    result = CliRunner().invoke(command)
    assert result.exit_code == 1
    assert "pip install 'pyarrow>=18'" in result.output
