"""The command line: lazy commands, errors without traceback, JSON reports, who prints."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner

from anchorcontext.cli import COMMANDS, common, group
from anchorcontext.cli.common import (
    Outcome,
    config_command,
    echo,
    option_group,
    plain_command,
    run_command,
    to_jsonable,
)
from anchorcontext.config import Config
from anchorcontext.errors import UserError

VALID = """\
model: {path: some/model}
data: {path: windows, window_tokens: 64}
train: {steps: 4, windows_per_step: 8}
"""


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(VALID)
    return path


@config_command
@click.option("--fail", type=click.Choice(["user", "bug", "status"]))
def command(config: Config, fail: str | None) -> Outcome:
    """A command for these tests."""
    if fail == "user":
        raise UserError("train.steps = 4: too many; give fewer")
    if fail == "bug":
        raise RuntimeError("a bug")
    echo(f"{config.train.steps} steps")
    return Outcome({"steps": config.train.steps}, exit_code=1 if fail == "status" else 0)


def anchorcontext(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "anchorcontext", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONSAFEPATH": "1", **environment},
        timeout=60,
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_every_listed_command_exists_and_has_help(name: str) -> None:
    module = importlib.import_module(f"anchorcontext.cli.{name.replace('-', '_')}")
    result = CliRunner().invoke(module.command, ["--help"])
    assert result.exit_code == 0
    assert "--json PATH" in result.output
    assert module.command.help


def test_help_imports_no_heavy_library() -> None:
    code = (
        "import sys\n"
        "from anchorcontext.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'transformers', 'deepspeed', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_misspelt_command_is_answered_with_the_nearest() -> None:
    result = CliRunner().invoke(group, ["prepaer"])
    assert result.exit_code == 2
    assert "did you mean prepare?" in result.output


def test_overrides_and_options_mix_in_any_order(config_path: Path) -> None:
    result = CliRunner().invoke(command, [str(config_path), "--fail", "status", "train.steps=7"])
    assert result.output == "7 steps\n"
    assert result.exit_code == 1


def test_a_group_of_options_arrives_as_one_dictionary_in_the_order_of_help() -> None:
    size = option_group(
        "size", wide=click.option("--wide", default=1), tall=click.option("--tall", default=2)
    )
    colours = option_group("colours", names=click.option("--colour", "names", multiple=True))

    @plain_command
    @click.option("--name", default="it")
    @size
    @colours
    def paint(name: str, size: dict[str, int], colours: dict[str, Any]) -> None:
        echo(f"{name} {size} {colours}")

    result = CliRunner().invoke(paint, ["--tall", "5", "--colour", "red"])
    assert result.output.strip() == "it {'wide': 1, 'tall': 5} {'names': ('red',)}"
    names = [parameter.name for parameter in paint.params]
    assert names == ["json_path", "name", "wide", "tall", "names"]


def test_a_users_mistake_is_one_line_and_status_2(config_path: Path) -> None:
    result = anchorcontext("config", str(config_path), "train.steps=0")
    assert result.returncode == 2
    assert result.stderr == (
        "error: override: train.steps = 0: must be at least 1; give 1 or more\n"
    )
    assert result.stdout == ""


def test_any_other_error_keeps_its_traceback(config_path: Path) -> None:
    result = CliRunner().invoke(command, [str(config_path), "--fail", "bug"])
    assert isinstance(result.exception, RuntimeError)


def test_the_report_is_written_whatever_the_status(config_path: Path, tmp_path: Path) -> None:
    report = tmp_path / "new" / "report.json"
    for arguments in ([], ["--fail", "status"]):
        CliRunner().invoke(command, [str(config_path), "--json", str(report), *arguments])
        assert json.loads(report.read_text()) == {"steps": 4}
        assert [path.name for path in report.parent.iterdir()] == ["report.json"]
        report.unlink()


def test_a_report_that_cannot_be_written_is_a_users_mistake(config_path: Path) -> None:
    report = config_path / "report.json"  # below a file
    result = CliRunner().invoke(command, [str(config_path), "--json", str(report)])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: --json = '{report}': cannot be written (")


@pytest.mark.parametrize("variable", ["RANK", "SLURM_PROCID"])
def test_only_rank_0_prints_and_writes(
    config_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv(variable, "1")
    report = tmp_path / "report.json"
    result = CliRunner().invoke(command, [str(config_path), "--json", str(report)])
    assert (result.exit_code, result.output) == (0, "")
    assert not report.exists()


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"RANK": "0"}, "error: wrong\n"),
        ({"RANK": "3"}, "error (rank 3): wrong\n"),
        ({"RANK": "3", "TORCHELASTIC_ERROR_FILE": "{}"}, ""),
    ],
)
def test_a_rank_speaks_unless_its_launcher_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    environment: dict[str, str],
    text: str,
) -> None:
    monkeypatch.setattr(common, "SILENT_RANK_GRACE_SECONDS", 0.0)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    told = tmp_path / "error.json"
    for name, value in environment.items():
        monkeypatch.setenv(name, value.format(told))

    def fail() -> None:
        raise UserError("wrong")

    assert run_command(fail) == 2
    assert capsys.readouterr().err == text
    if "TORCHELASTIC_ERROR_FILE" in environment:
        assert "wrong" in told.read_text()


def test_reports_hold_what_commands_find() -> None:
    @dataclass
    class Found:
        path: Path
        loss: float

    value: Any = {
        "found": [Found(Path("a/b"), 1.5)],
        "array": np.arange(3),
        "scalar": np.float32(0.5),
        "worst": float("inf"),
        "nothing": (None, True),
    }
    assert to_jsonable(value) == {
        "found": [{"path": "a/b", "loss": 1.5}],
        "array": [0, 1, 2],
        "scalar": 0.5,
        "worst": "inf",
        "nothing": [None, True],
    }
    with pytest.raises(TypeError, match="cannot hold a object"):
        to_jsonable(object())


def test_config_prints_what_loads_again(config_path: Path, tmp_path: Path) -> None:
    result = anchorcontext("config", str(config_path), "optimizer.lr=1e-4", "--world", "4")
    assert result.returncode == 0
    assert "# 4 ranks: dp 4, sp 1, accumulation 2" in result.stdout
    printed = tmp_path / "printed.yaml"
    printed.write_text(result.stdout)
    assert anchorcontext("config", str(printed)).stdout.splitlines()[1:] == [
        line for line in result.stdout.splitlines() if not line.startswith("#")
    ]
