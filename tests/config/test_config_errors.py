"""Every mistake is one line: file and line, key, value, rule, fix."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from anchorcontext.config import load_config
from anchorcontext.errors import UserError

VALID = """\
run: {name: job}
model: {path: some/model}
data: {path: windows, window_tokens: 64}
train:
  steps: 4
  windows_per_step: 8
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(VALID)
    return path


def message(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("train.stpes=3", "train.steps"),
        ("train.lr=1e-4", "optimizer.lr"),
        ("optimiser.lr=1", "optimizer"),
        ("watch.wandb={projct: a}", "watch.wandb.project"),
        ("data.sources=[{paht: a}]", "data.sources.0.path"),
        ("model.rope.thta=1", "model.rope.theta"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(
    path: Path, override: str, near: str
) -> None:
    assert f"unknown key; did you mean {near}?" in message(path, override)


def test_an_unknown_key_without_a_near_one_is_answered_with_the_section(path: Path) -> None:
    text = message(path, "loss.quux=1")
    assert "loss.quux: unknown key; loss takes boundary, chunk_tokens" in text


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.steps=0", "train.steps = 0: must be at least 1; give 1 or more"),
        ("train.steps='8'", "train.steps = '8': must be a whole number; write it without quotes"),
        ("train.steps=true", "train.steps = true: must be a whole number"),
        ("train.steps=8.0", "train.steps = 8.0: must be a whole number"),
        ("train.steps=null", "train.steps = null: must be a whole number"),
        ("train.zero_stage=true", "train.zero_stage = true: must be a whole number"),
        ("train.zero_stage=4", "train.zero_stage = 4: must be at most 3; give 3 or less"),
        ("optimizer.lr=fast", "optimizer.lr = 'fast': must be a number"),
        ("optimizer.lr=.nan", "optimizer.lr = nan: must be finite"),
        ("optimizer.betas=[0.9]", "optimizer.betas.1 = null: has too few entries"),
        ("optimizer.betas=[0.9,1.0]", "optimizer.betas.1 = 1.0: must be less than 1"),
        ("attention.mode=achor", "full, intra_doc, intra_doc_reset, anchor; did you mean anchor?"),
        ("evaluate.tasks=[held_out,niah]", "niah_single; did you mean niah_single?"),
        ("data.anchor=-1", "data.anchor = -1: must be one of auto, bos, eos, none, an integer"),
        ("watch.progress=1", "watch.progress = 1: must be true or false"),
        ("run.name=12", "run.name = 12: must be text; put it in quotes"),
        ("run.name=a/b", "run.name = 'a/b': is the name of a folder inside run.output_dir; leave"),
        ("train=3", "train = 3: must be a section; write its keys below it: steps, "),
        ("deepspeed=3", "deepspeed = 3: must be a mapping"),
    ],
)
def test_a_wrong_value_names_the_key_the_value_the_rule_and_the_fix(
    path: Path, override: str, line: str
) -> None:
    assert line in message(path, override)


def test_a_missing_key_is_described(path: Path) -> None:
    path.write_text(VALID.replace("  steps: 4\n", ""))
    text = message(path)
    assert re.search(r"job\.yaml:4: train\.steps is missing: Optimiser steps of the whole", text)


def test_all_mistakes_are_told_at_once_with_their_lines(path: Path) -> None:
    path.write_text(VALID.replace("steps: 4", "steps: 0") + "loss: {chunk_tokens: 0}\n")
    lines = message(path, "optimizer.lr=-1").splitlines()
    assert len(lines) == 3
    assert lines[0].startswith(f"{path}:7: loss.chunk_tokens = 0: ")
    assert lines[1].startswith("override: optimizer.lr = -1: ")
    assert lines[2].startswith(f"{path}:5: train.steps = 0: ")


def test_a_key_that_stands_twice_is_refused_with_both_lines(path: Path) -> None:
    path.write_text(VALID + "  steps: 5\n")
    assert f"{path}:7: train.steps: stands twice, first at {path}:5" in message(path)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "holds nothing; a config is a mapping"),
        ("- a\n", "holds a list"),
        ("a: [1\n", "not YAML"),
        ("run:\n\tname: a\n", r"job.yaml:2: not YAML"),
        ("1: a\n", "key '1': a key is text"),
        ("a: !!python/object/apply:os.getcwd []\n", "not YAML"),
    ],
)
def test_a_file_that_is_no_config_is_refused(path: Path, text: str, part: str) -> None:
    path.write_text(text)
    assert part in message(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "no such config file" in message(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("train.steps", "has the form section.key=value"),
        ("=3", "has the form section.key=value"),
        ("train.steps=", "has no value; write train.steps=null for none"),
        ("train.steps=[1", "is not a YAML value"),
        ("train.steps.more=1", "train.steps is no section"),
        ("data.sources.0.path=a", "must be an index of a list of 0"),
    ],
)
def test_a_broken_override_is_refused(path: Path, override: str, part: str) -> None:
    path.write_text(VALID.replace("path: windows", "path: windows, sources: []"))
    assert part in message(path, override)
