"""The commands rope, first-token: tables, JSON, sheets for the report, a Markdown section."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from anchorcontext.cli.diagnose import command


def test_rope_leaves_sheet_json_and_markdown(
    model_folder: str, documents: str, tmp_path: Path
) -> None:
    options = (
        f"rope {model_folder} --sources bf16,normal --layers 0 --stacks sdpa:bf16 --offsets 0,1024 "
        f"--tokens 16 --heads 1 --source {documents} --no-deepspeed --threads 1 "
        f"--out {tmp_path / 'out'} --markdown {tmp_path / 'page.md'} --json {tmp_path / 'r.json'}"
    )
    ran = CliRunner().invoke(command, options.split())
    assert ran.exit_code == 0, ran.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["settings"]["offsets"] == [0, 1024] and report["readings"]
    sheet = json.loads((tmp_path / "out" / "rope.sheet.json").read_text())
    assert list(sheet["figures"]) == ["rope-parts", "rope-offset"]
    assert (tmp_path / "out" / "figures" / "rope-parts.svg").exists()
    page = (tmp_path / "page.md").read_text()
    assert "<!-- begin rope -->" in page and "(page/rope-offset.png)" in page
    again = CliRunner().invoke(command, [*options.split(), "--stored", "--no-figures"])
    assert again.exit_code == 0 and "offset 0 after" not in again.output


def test_nothing_stored_is_said(model_folder: str, documents: str, tmp_path: Path) -> None:
    for name in ("rope", "first-token"):
        options = [name, model_folder, "--stored", "--out", str(tmp_path), "--source", documents]
        ran = CliRunner().invoke(command, [*options, "--tokens", "128"])
        assert ran.exit_code == 2 and "nothing is stored" in ran.output


def test_wrong_lists_are_refused(model_folder: str, tmp_path: Path) -> None:
    for name, option, value in (
        ("rope", "--offsets", "0;1"),
        ("rope", "--stacks", "flash:bf16"),
        ("first-token", "--arms", "sink"),
        ("first-token", "--shifts", "16"),
    ):
        ran = CliRunner().invoke(command, [name, model_folder, option, value])
        assert ran.exit_code == 2 and value.split(";")[0] in ran.output
    ran = CliRunner().invoke(command, ["rope", str(tmp_path)])
    assert ran.exit_code == 2 and "no model folder" in ran.output
