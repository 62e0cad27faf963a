"""``anchorcontext diagnose shift`` on the command line."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from anchorcontext.cli.diagnose import DIAGNOSES, command
from anchorcontext.cli.diagnose.common import command_line
from anchorcontext.cli.diagnose.shift import command as shift_command


def shift(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, ["shift", *map(str, arguments)])


@pytest.fixture
def options(corpus: Path, tmp_path: Path) -> list[str | Path]:
    chosen = "--settings bf16 --beside fp64 --beside-tokens 16 --shifts 0,4 --tokens 32"
    more = "--lengths 16,32 --texts 1 --threads 1"
    return [*f"{chosen} {more}".split(), "--source", corpus, "--out", tmp_path / "out"]


def test_it_measures_draws_and_writes(
    short_model: Path, options: list[str | Path], tmp_path: Path
) -> None:
    page, report = tmp_path / "docs" / "precision.md", tmp_path / "report.json"
    page.parent.mkdir()
    page.write_text("# Precision\n")
    done = shift(short_model, *options, "--markdown", page, "--json", report)
    assert done.exit_code == 0, done.output
    assert "pretrained:fp64" in done.output
    deviations = json.loads(report.read_text())["deviations"]
    assert [(d["setting"], d["kind"], d["tokens"], d["shift"]) for d in deviations] == [
        ("pretrained:bf16", "length", 16, 0),
        ("pretrained:bf16", "length", 32, 0),
        ("pretrained:fp64", "length", 16, 0),
        ("pretrained:bf16", "shift", 32, 0),
        ("pretrained:bf16", "shift", 32, 4),
    ]
    text = page.read_text()
    assert text.startswith("# Precision\n") and "--shifts 0,4" in text
    assert (page.parent / "precision" / "shift-by-token.svg").exists()

    again = shift(short_model, *options, "--stored", "--json", report)
    assert again.exit_code == 0
    assert json.loads(report.read_text())["deviations"] == deviations


def test_nothing_stored_is_said(short_model: Path, options: list[str | Path]) -> None:
    done = shift(short_model, *options, "--stored")
    assert done.exit_code == 2 and "no text is complete there" in done.output


@pytest.mark.parametrize("flag", ["--same-input", "--own-input", "--no-extrapolate"])
def test_the_command_on_the_page_can_be_typed(short_model: Path, flag: str) -> None:
    typed = [str(short_model), flag, "--source", "a b"]
    with shift_command.make_context("shift", typed) as context:
        chosen = {key: context.params[key] for key in ("same_input", "extrapolate", "source")}
        line = command_line("shift", str(short_model), chosen)
    words = shlex.split(line)
    assert flag in words and words[-2:] == ["--source", "a b"]
    shift_command.make_context("shift", words[3:])  # every word is an option of the command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--settings", "bf17"], "setting 'bf17'"),
        (["--shifts", "1,x"], "--shifts 1,x: give whole numbers"),
        (["--panels", "heads"], "--panels heads: choose from"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str, short_model: Path) -> None:
    done = shift(short_model, *arguments)
    assert done.exit_code == 2 and message in done.output


def test_a_folder_without_a_model() -> None:
    done = shift("nowhere")
    assert done.exit_code == 2 and "no model folder" in done.output


def test_help_lists_every_diagnosis() -> None:
    done = CliRunner().invoke(command, ["--help"])
    assert all(name in done.output for name in DIAGNOSES)
