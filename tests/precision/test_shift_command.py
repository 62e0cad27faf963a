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
from anchorcontext.cli.diagnose.shift import read_settings
from anchorcontext.precision.first_token.measure import FirstTokenSettings
from anchorcontext.precision.gradients.measure import GradientSettings
from anchorcontext.precision.rope.measure import RopeSettings
from anchorcontext.precision.shift.settings import PRESETS


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
    assert "<!-- begin shift -->" in text and "(precision/shift-by-token.png)" in text
    assert (page.parent / "precision" / "shift-by-token.svg").exists()
    sheet = json.loads((tmp_path / "out" / "shift.sheet.json").read_text())
    assert "shift-by-token" in sheet["figures"]
    assert done.output.index(sheet["readings"][0]) < done.output.index(sheet["tables"][0]["title"])

    again = shift(short_model, *options, "--stored", "--no-figures", "--json", report)
    assert again.exit_code == 0 and "drawn to" not in again.output
    assert json.loads(report.read_text())["deviations"] == deviations


def test_what_is_not_given_is_the_presets() -> None:
    given = {"settings": "bf16,random:bf16", "shifts": "0,4", "tokens": 64, "texts": None}
    chosen = read_settings("m", "quick", given)
    assert [str(setting) for setting in chosen.settings] == ["pretrained:bf16", "random:bf16"]
    assert chosen.beside == () and (chosen.shifts, chosen.tokens) == ((0, 4), 64)
    assert chosen.lengths == PRESETS["quick"].lengths and chosen.texts == PRESETS["quick"].texts
    assert read_settings("m", "quick", {}).beside == PRESETS["quick"].beside
    with_it = read_settings("m", "quick", {"settings": "bf16", "beside": "fp64"})
    assert [str(setting) for setting in with_it.beside] == ["pretrained:fp64"]


def test_help_says_the_defaults() -> None:
    def help_of(name: str) -> str:
        return " ".join(CliRunner().invoke(command, [name, "--help"]).output.split())

    text = help_of("shift")
    for preset in PRESETS.values():
        lengths = f"lengths {preset.lengths[0]} to {preset.lengths[-1]:,}"
        shifts = f"{len(preset.shifts)} shifts"
        assert f"{preset.tokens:,} tokens, {shifts}, {lengths}, {preset.texts} texts" in text
        assert f"to {preset.beside_tokens:,} tokens" in text
        assert (preset.reference, preset.length_shift, preset.seed) == (16, 0, 0)
    for name, settings in (
        ("rope", RopeSettings("m")),
        ("first-token", FirstTokenSettings("m")),
        ("gradients", GradientSettings("m")),
    ):
        text = help_of(name)
        assert f"sequence, default {settings.tokens:,}." in text
        assert f"Sequences, default {settings.texts};" in text
    rope = RopeSettings("m")
    assert f"default {','.join(map(str, rope.offsets))}" in help_of("rope")
    assert (rope.heads, rope.shift, FirstTokenSettings("m").shifts) == (3, 16, (16, 0))


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
