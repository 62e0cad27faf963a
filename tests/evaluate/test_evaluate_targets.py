"""What a name on the command line means: folders, runs, checkpoints, snapshots; their identity."""

import json
import shutil
from pathlib import Path

import pytest

from anchorcontext.config import load_config
from anchorcontext.config.load import resolved_yaml
from anchorcontext.data.store import TOKENIZER
from anchorcontext.data.tokenizer import train_tokenizer
from anchorcontext.errors import UserError
from anchorcontext.evaluate.target import find_targets
from anchorcontext.testing.models import tiny_model
from anchorcontext.train.checkpoint_files import write_manifest

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"


@pytest.fixture
def tokenizer_folder(tmp_path):
    folder = tmp_path / TOKENIZER
    train_tokenizer(["some words to learn from"], 300).save_pretrained(folder)
    return folder


@pytest.fixture
def run(tmp_path, tokenizer_folder):
    """The outside of a run: checkpoints of steps 20 to 60, 10 apart, without weights."""
    prepared = tokenizer_folder.parent
    where = [f"data.path={prepared}", f"run.output_dir={tmp_path}", "run.name=run"]
    config = load_config(DEMO, where)
    text = resolved_yaml(config)
    for step in range(20, 70, 10):
        folder = tmp_path / "run" / "checkpoints" / f"step-{step:06d}"
        (folder / "hf").mkdir(parents=True)
        (folder / "hf" / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
        (folder / "config.yaml").write_text(text)
        (folder / "engine").mkdir()
        (folder / "engine" / "weights.pt").write_bytes(bytes([1]) * 5000)
        write_manifest(folder, {"step": step, "layout": {}})
    (tmp_path / "run.yaml").write_text(text)
    return tmp_path / "run"


@pytest.fixture
def hf(tmp_path, tokenizer_folder):
    folder = tmp_path / "run" / "hf"
    tiny_model(vocab_size=320).save_pretrained(folder)
    for file in tokenizer_folder.iterdir():
        shutil.copy(file, folder)
    return folder


def test_a_run_its_config_and_its_checkpoint_mean_the_latest(run):
    latest = run / "checkpoints" / "step-000060"
    for source in (run, run / "checkpoints", latest, run.parent / "run.yaml"):
        (target,) = find_targets([source])
        assert (target.path, target.name) == (latest, "run-step-000060")
        assert target.positions() == 512


def test_a_checkpoint_is_asked_with_the_bos_of_its_windows_once(run):
    (target,) = find_targets([run])
    tokenizer = target.tokenizer()
    ids = tokenizer("some words")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in ids[1:]


def test_snapshots_are_the_last_ones_so_many_steps_apart(run):
    steps = [t.path.name for t in find_targets([run], snapshots=3, apart=20)]
    assert steps == ["step-000020", "step-000040", "step-000060"]
    assert len(find_targets([run], snapshots=5, apart=10)) == 5


@pytest.mark.parametrize(("snapshots", "apart"), [(6, 10), (3, 15), (6, None)])
def test_missing_snapshots_are_named(run, snapshots, apart):
    with pytest.raises(UserError, match=r"5 complete checkpoints.*checkpoint\.every"):
        find_targets([run], snapshots=snapshots, apart=apart)


def test_a_folder_has_what_its_tokenizer_does_unless_bos_is_asked_for(hf):
    (target,) = find_targets([hf])
    assert (target.name, target.bos, target.is_checkpoint) == ("run-hf", None, False)
    (target,) = find_targets([hf], bos=True)
    assert target.bos == target.tokenizer().bos_token_id


def test_other_weights_of_a_checkpoint_are_another_model(run):
    """Its manifest alone would not tell: it has the sizes of torch's archives only."""
    (target,) = find_targets([run])
    before = target.digest()
    assert find_targets([run])[0].digest() == before
    weights = target.path / "engine" / "weights.pt"
    weights.write_bytes(bytes(5000))
    assert target.digest() != before


def test_other_weights_are_another_model(hf):
    (target,) = find_targets([hf])
    before = target.digest()
    assert find_targets([hf])[0].digest() == before
    tiny_model(vocab_size=320, seed=1).save_pretrained(hf)
    assert target.digest() != before


@pytest.mark.parametrize(
    ("name", "message"),
    [("nothing", "no such folder"), ("tokenizer", "no complete checkpoint")],
)
def test_what_is_no_model_is_refused(tmp_path, tokenizer_folder, name, message):
    with pytest.raises(UserError, match=message):
        find_targets([tmp_path / name])


def test_a_model_named_twice_is_refused(run):
    with pytest.raises(UserError, match="named twice"):
        find_targets([run, run / "checkpoints"])
