"""The files of configs/controls/: each is one run of the paper's recipe with one thing varied."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from anchorcontext.config import flat_values, load_config, save_config

ROOT = Path(__file__).parents[2]
CONTROLS = sorted((ROOT / "configs" / "controls").glob("*.yaml"))
VARIED = ("attention.mode", "attention.anchor.", "attention.precision.", "positions.", "run.name")


@pytest.mark.parametrize("path", CONTROLS, ids=lambda path: path.stem)
def test_a_control_loads_round_trips_and_varies_nothing_else(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    assert config.run.name == path.stem
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
    plain = flat_values(load_config(ROOT / "configs" / "llama3_8b_64k_anchor.yaml"))
    varied = {key for key, value in flat_values(config).items() if plain[key] != value}
    assert len(varied) > 1 and all(key.startswith(VARIED) for key in varied)


def test_no_two_controls_are_the_same_run() -> None:
    runs = [flat_values(load_config(path)) | {"run.name": ""} for path in CONTROLS]
    assert all(run not in runs[:number] for number, run in enumerate(runs))


def test_the_documentation_lists_every_control_and_no_other() -> None:
    text = (ROOT / "docs" / "controls.md").read_text()
    named = set(re.findall(r"^\| `((?:does|is)_\w+)` ", text, re.MULTILINE))
    assert named == {path.stem for path in CONTROLS}
