"""The files of configs/: each loads, round-trips and says what its name says."""

from __future__ import annotations

from pathlib import Path

import pytest

from anchorcontext.config import load_config, save_config
from anchorcontext.config.reference import reference_markdown

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
PAPER = [
    ("llama3_8b_64k", 65536, 5e6),
    ("llama2_7b_128k", 131072, 1e7),
    ("qwen2_7b_128k", 131072, 1e7),
    ("mistral_7b_64k", 65536, 5e6),
]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_loads_and_round_trips(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    assert config.run.name == path.stem
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(("stem", "window", "theta"), PAPER, ids=lambda value: str(value))
def test_the_papers_recipes_have_its_hyper_parameters(stem: str, window: int, theta: float) -> None:
    config = load_config(ROOT / "configs" / f"{stem}_anchor.yaml")
    optimizer, train = config.optimizer, config.train
    assert (optimizer.type, optimizer.lr, optimizer.betas) == ("adamw", 2e-5, (0.9, 0.95))
    assert (optimizer.weight_decay, config.schedule.type) == (0.1, "constant")
    assert (config.schedule.warmup_steps, train.clip_norm) == (0, 1.0)
    assert (train.steps, train.windows_per_step) == (2000, 8)
    assert (config.data.window_tokens, config.model.rope.theta) == (window, theta)
    assert config.attention.mode == "anchor"
    assert config.check_world(8).accumulation == 8
    assert config.check_world(64).accumulation == 1


@pytest.mark.parametrize("mode", ["full", "intra_doc"])
@pytest.mark.parametrize("stem", [stem for stem, _, _ in PAPER])
def test_a_twin_differs_only_in_its_mode(stem: str, mode: str) -> None:
    anchor = load_config(ROOT / "configs" / f"{stem}_anchor.yaml").model_dump()
    twin = load_config(ROOT / "configs" / f"{stem}_{mode}.yaml").model_dump()
    assert twin["attention"]["mode"] == mode
    twin["attention"]["mode"], twin["run"]["name"] = "anchor", anchor["run"]["name"]
    assert twin == anchor


def test_every_key_is_described() -> None:
    for line in reference_markdown().splitlines():
        if line.startswith("| `"):
            key, _, _, meaning = (cell.strip() for cell in line.strip("| ").split(" | "))
            assert len(meaning) > 10, f"{key} has no description"
            assert meaning.endswith("."), f"{key}: a description is a sentence"


def test_the_committed_reference_is_up_to_date() -> None:
    committed = (ROOT / "docs" / "config.md").read_text()
    assert committed == reference_markdown().rstrip() + "\n", "run `make docs` and commit"
