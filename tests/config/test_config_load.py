"""Loading a config: YAML scalars, overrides, extends, and saving it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from anchorcontext.config import Config, config_hash, load_config, parse_config, save_config
from anchorcontext.errors import UserError

MINIMAL = """\
model: {path: some/model}
data: {path: windows, window_tokens: 64}
train: {steps: 4, windows_per_step: 8}
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str, name: str = "job.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def test_the_run_takes_the_name_of_the_file(write: Any) -> None:
    assert load_config(write(MINIMAL)).run.name == "job"
    assert load_config(write(MINIMAL + "run: {name: other}\n")).run.name == "other"


def test_defaults_are_the_papers_hyper_parameters(write: Any) -> None:
    config = load_config(write(MINIMAL))
    optimizer = config.optimizer
    assert (optimizer.type, optimizer.lr, optimizer.betas) == ("adamw", 2e-5, (0.9, 0.95))
    assert (optimizer.weight_decay, config.train.clip_norm) == (0.1, 1.0)
    assert (config.schedule.type, config.schedule.warmup_steps) == ("constant", 0)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-5", 1e-5), ("1E-5", 1e-5), (".5", 0.5), ("1.e-3", 1e-3), ("2", 2.0), ("1_000.5", 1000.5)],
)
def test_numbers_are_numbers(write: Any, text: str, value: float) -> None:
    assert load_config(write(MINIMAL + f"optimizer: {{lr: {text}}}\n")).optimizer.lr == value
    assert load_config(write(MINIMAL), [f"optimizer.lr={text}"]).optimizer.lr == value


@pytest.mark.parametrize(
    "name", ["no", "off", "on", "yes", "y", "2024-01-31", "1:30", "0x1f", "<<"]
)
def test_text_that_yaml_1_1_reads_as_something_else_stays_text(write: Any, name: str) -> None:
    config = load_config(write(MINIMAL + f"run: {{name: {name}}}\n"))
    assert config.run.name == name


def test_an_override_is_read_as_yaml(write: Any) -> None:
    config = load_config(
        write(MINIMAL + "deepspeed: {steps_per_print: 5}\n"),
        [
            "optimizer.betas=[0.8, 0.9]",
            "train.clip_norm=null",
            "watch.wandb={project: p}",
            "run.name='12'",
            "deepspeed.zero_optimization.offload_optimizer.device=cpu",
            "data.window_tokens=65_536",
        ],
    )
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.train.clip_norm is None
    assert config.watch.wandb is not None
    assert config.watch.wandb.project == "p"
    assert config.run.name == "12"
    assert config.deepspeed == {
        "steps_per_print": 5,
        "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
    }
    assert config.data.window_tokens == 65536


def test_an_override_reaches_into_a_list_and_the_last_one_wins(write: Any) -> None:
    text = MINIMAL.replace(
        "path: windows", "path: windows, sources: [{path: a.txt}, {path: b.txt}]"
    )
    config = load_config(write(text), ["data.sources.1.path=c.txt", "data.sources.1.path=d.txt"])
    assert [source.path for source in config.data.sources] == ["a.txt", "d.txt"]
    assert [source.name for source in config.data.sources] == ["a", "d"]


def test_wandb_takes_true_false_or_a_section(write: Any) -> None:
    path = write(MINIMAL)
    assert load_config(path, ["watch.wandb=false"]).watch.wandb is None
    enabled = load_config(path, ["watch.wandb=true"]).watch.wandb
    assert enabled is not None
    assert enabled.project == "anchorcontext"


def test_extends_merges_sections_and_replaces_lists(write: Any) -> None:
    write(MINIMAL + "optimizer: {lr: 1e-3, betas: [0.8, 0.9], eps: 1e-6}\n", "base/base.yaml")
    write("extends: base/base.yaml\noptimizer: {lr: 2e-3}\n", "middle.yaml")
    config = load_config(write("extends: middle.yaml\noptimizer: {betas: [0.5, 0.6]}\n"))
    assert (config.optimizer.lr, config.optimizer.betas) == (2e-3, (0.5, 0.6))
    assert (config.optimizer.eps, config.model.path) == (1e-6, "some/model")


def test_extends_in_a_circle_is_refused(write: Any) -> None:
    write("extends: b.yaml\n", "a.yaml")
    path = write("extends: a.yaml\n", "b.yaml")
    with pytest.raises(UserError, match=r"extends itself: b\.yaml -> a\.yaml -> b\.yaml"):
        load_config(path)


def test_a_mistake_in_the_extended_file_is_located_there(write: Any) -> None:
    write(MINIMAL + "optimizer:\n  lr: -1.0\n", "base.yaml")
    path = write("extends: base.yaml\n")
    with pytest.raises(UserError, match=r"base\.yaml:5: optimizer\.lr = -1\.0"):
        load_config(path)


@pytest.mark.parametrize(
    "extra",
    ["", "watch: {wandb: true}\n", "run: {name: 'off'}\n", "run: {name: '1e-5', seed: 3}\n"],
)
def test_a_saved_config_loads_equal(write: Any, tmp_path: Path, extra: str) -> None:
    config = load_config(write(MINIMAL + extra), ["optimizer.eps=1e-12", "deepspeed.a={b: ['no']}"])
    save_config(config, tmp_path / "saved" / "config.yaml")
    again = load_config(tmp_path / "saved" / "config.yaml")
    assert again == config
    assert config_hash(again) == config_hash(config)
    # Any other reader of YAML sees the same texts, too.
    plain = yaml.safe_load((tmp_path / "saved" / "config.yaml").read_text())
    assert plain["run"]["name"] == config.run.name


def test_the_hash_changes_with_any_value(write: Any) -> None:
    path = write(MINIMAL)
    hashes = [
        config_hash(load_config(path, overrides))
        for overrides in ([], ["run.seed=1"], ["deepspeed.x=1"], ["optimizer.lr=2.1e-5"])
    ]
    assert len(set(hashes)) == 4
    assert config_hash(load_config(path)) == hashes[0]


def test_a_config_cannot_be_changed_after_loading(write: Any) -> None:
    config = load_config(write(MINIMAL))
    with pytest.raises(ValueError, match="frozen"):
        config.train.steps = 5  # type: ignore[misc]


def test_a_mapping_is_checked_like_a_file() -> None:
    values = yaml.safe_load(MINIMAL) | {"run": {"name": "r"}}
    assert isinstance(parse_config(values), Config)
    with pytest.raises(UserError, match=r"config: trian: unknown key; did you mean train\?"):
        parse_config(values | {"trian": {}})
