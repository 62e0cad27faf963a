"""`evaluate --tasks loss-by-position`: a folder or a run, one process or two, the same table."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from anchorcontext.cli import group
from anchorcontext.data.tokenizer import train_tokenizer
from anchorcontext.errors import UserError
from anchorcontext.evaluate.by_position import PositionOptions, measure_positions
from anchorcontext.evaluate.target import find_targets
from anchorcontext.testing import run_distributed
from anchorcontext.testing.models import tiny_llama
from anchorcontext.train.loop import train


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """One text of more than 2,048 tokens and a short one."""
    folder = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(0)
    words = ["anchor", "window", "token", "rank", "layout", "loss", "mask"]
    (folder / "long.txt").write_text(" ".join(rng.choice(words, 3000)))
    (folder / "short.txt").write_text("a short text")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = train_tokenizer([(texts / "long.txt").read_text()], 290)
    tiny_llama(num_hidden_layers=1, vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def measured(rank, world_size, folder, options, output):
    return measure_positions(find_targets([folder]), options, output)


def test_one_process_and_two_ranks_give_one_table(model, texts, tmp_path):
    arguments = ["--tasks", "loss-by-position", "--lengths", "2K", "--short", "1024"]
    arguments += ["--documents", str(texts), "--dtype", "fp32", "--output", str(tmp_path)]
    result = CliRunner().invoke(group, ["evaluate", str(model), *arguments])
    assert result.exit_code == 0, result.output
    (found,) = json.loads((tmp_path / "results.json").read_text())["loss-by-position"]
    assert (found["documents"], found["length"], found["short_context"]) == (1, 2048, 1024)
    near, far = found["buckets"]
    assert (near["start"], near["stop"], near["targets"], near["gain"]) == (0, 1024, 1023, None)
    assert (far["start"], far["stop"], far["targets"]) == (1024, 2048, 1024)
    assert found["gain"] == far["gain"] != 0
    assert (tmp_path / "loss_by_position.png").stat().st_size > 1000
    assert "| 1,024 to 2,048 | 1,024 |" in (tmp_path / "results.md").read_text()

    options = PositionOptions(length=2048, short=1024, texts=(str(texts),), dtype="fp32")
    for ranks in run_distributed(measured, 2, model, options, tmp_path):
        (shared,) = ranks
        assert (shared.dp, shared.sp) == (1, 2)
        for one, other in zip(found["buckets"], shared.buckets, strict=True):
            for name in ("loss", "short_loss", "gain"):
                assert getattr(other, name) == pytest.approx(one[name], abs=1e-5)


def test_a_run_is_measured_on_its_own_held_out_documents(tiny, prepared, tmp_path):
    windows = shutil.copytree(prepared, tmp_path / "windows")
    data = {"path": str(windows), "validation_fraction": 0.1}
    config = tiny(train={"steps": 1}, parallel={"sp": 2}, data=data)
    options = PositionOptions(length=60, dtype="fp32")

    def both(rank, world_size):
        train(config)
        folder = Path(config.run.output_dir) / "tiny"
        return measure_positions(find_targets([folder]), options, tmp_path / "out")

    (found,), (other,) = run_distributed(both, 2, group_timeout=60.0)
    assert found.buckets == other.buckets
    assert found.model == "tiny-step-000001" and found.documents == 2  # of 90 and of 71 tokens
    assert found.source.startswith("validation split of ")
    assert [b.targets for b in found.buckets] == [2 * 59] and found.gain is None
    assert list((tmp_path / "out").iterdir()) == []  # the export is gone

    meta = Path(config.data.path) / "meta.json"
    values = json.loads(meta.read_text())
    del values["splits"]["validation"]
    meta.write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"holds nothing out.*--documents"):
        measure_positions(
            find_targets([Path(config.run.output_dir) / "tiny"]), options, tmp_path / "out"
        )


def test_what_cannot_be_measured_is_refused(model, texts, tmp_path):
    targets = find_targets([model])
    for options, words in (
        (PositionOptions(length=8192), "max_position_embeddings = 4,096"),
        (PositionOptions(length=2048, short=1000), "--short 1000: .* one of 1024$"),
        (PositionOptions(length=2048), "no run of ours.*--documents"),
        (PositionOptions(length=4096, texts=(str(texts),)), r"longest document.* has 3,\d+ tokens"),
        (PositionOptions(length=2048, dtype="fp16"), "--dtype fp16"),
    ):
        with pytest.raises(UserError, match=words):
            measure_positions(targets, options, tmp_path)
