"""`average`: means of weights against an independent computation, of scores by hand; refusals."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from anchorcontext.cli import group
from anchorcontext.data.tokenizer import train_tokenizer
from anchorcontext.evaluate.average import average_weights
from anchorcontext.evaluate.scores import average_scores
from anchorcontext.evaluate.target import find_targets
from anchorcontext.testing import run_distributed
from anchorcontext.testing.models import tiny_llama
from anchorcontext.train.consolidate import load_consolidated_state_dict
from anchorcontext.train.loop import train


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["some words of a text"] * 9, 300)


def saved(folder, seed, tokenizer, dtype=torch.bfloat16, **changes):
    model = tiny_llama(seed=seed, dtype=dtype, **changes)
    model.config.dtype = dtype
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def average(*arguments):
    return CliRunner().invoke(group, ["average", *map(str, arguments)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_the_mean_in_fp32_over_several_files(tmp_path, tokenizer, dtype, tied):
    folders = [
        saved(tmp_path / f"s{n}", n, tokenizer, dtype, tie_word_embeddings=tied) for n in range(3)
    ]
    out = tmp_path / "mean"
    report = average_weights(find_targets(folders), out, file_bytes=100_000).export
    weights = [load_file(folder / "model.safetensors") for folder in folders]
    found = {}
    for file in out.glob("*.safetensors"):
        found |= load_file(file)
    assert found.keys() == weights[0].keys() and report.num_tensors == len(found)
    for name, mean in found.items():
        exact = sum(each[name].double() for each in weights) / 3
        assert mean.dtype == dtype
        torch.testing.assert_close(
            mean.double(), exact, rtol=2**-8 if mean.dtype == torch.bfloat16 else 1e-6, atol=1e-8
        )
        if dtype == torch.bfloat16:  # rounded once, from fp32
            assert torch.equal(mean, (sum(each[name].float() for each in weights) / 3).bfloat16())
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 1
    assert max(path.stat().st_size for path in out.glob("model-*")) < 110_000
    model = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(
        model.state_dict()["lm_head.weight"].to(dtype),
        found.get("lm_head.weight", found["model.embed_tokens.weight"]),
    )
    assert (out / "tokenizer.json").is_file()
    assert not list(tmp_path.glob(".mean*"))


def test_a_run_is_averaged_over_its_last_checkpoints(tmp_path, tiny):
    config = tiny(
        train={"steps": 6, "windows_per_step": 2},
        checkpoint={"every": 2, "keep": 9},
        optimizer={"lr": 1e-1},
    )
    run_distributed(lambda rank, world_size, config: train(config).step, 1, config)
    folder = Path(config.run.output_dir) / "tiny"
    result = average(folder, "--snapshots", 2, "--apart", 2, "--out", tmp_path / "mean")
    assert result.exit_code == 0, result.output
    assert "step-000004" in result.output and "step-000006" in result.output
    one, two = (
        load_consolidated_state_dict(folder / "checkpoints" / f"step-{step:06d}") for step in (4, 6)
    )
    found = load_file(tmp_path / "mean" / "model.safetensors")
    for name, mean in found.items():
        assert not torch.equal(one[name], two[name])
        torch.testing.assert_close(mean, (one[name] + two[name]) / 2, rtol=1e-6, atol=1e-8)
    assert (tmp_path / "mean" / "tokenizer.json").is_file()


def test_snapshots_that_do_not_belong_together_are_refused_by_name(tmp_path, tokenizer):
    first = saved(tmp_path / "first", 0, tokenizer)
    rope = {"rope_type": "default", "rope_theta": 5e6}
    other = saved(tmp_path / "other", 0, tokenizer, rope_parameters=rope)
    wide = saved(tmp_path / "wide", 0, tokenizer, torch.float32)
    config = json.loads((first / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps(config))
    less = saved(tmp_path / "less", 0, tokenizer)
    weights = load_file(less / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, less / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "mean"
    for second, words in (
        (other, "other has rope_parameters = "),
        (wide, "has dtype torch.float32 in wide, torch.bfloat16 in first"),
        (less, "less lacks model.norm.weight of first"),
    ):
        result = average(first, second, "--out", out)
        assert result.exit_code == 2 and words in result.output, result.output
        assert not out.exists() and not list(tmp_path.glob(".mean*"))
    assert "first: at least 2 snapshots" in average(first, "--out", out).output
    assert "--out is missing" in average(first, less).output
    out.mkdir()
    assert "exists" in average(first, saved(tmp_path / "second", 1, tokenizer), "--out", out).output


def results(path, model, vt, loss):
    rows = [
        {"model": model, "task": "ruler_vt", "length": 4096, "score": vt},
        {"model": model, "task": "hellaswag", "length": None, "score": 50.0},
    ]
    buckets = [
        {"start": 0, "stop": 1024, "loss": loss},
        {"start": 1024, "stop": 2048, "loss": None},
    ]
    values = {
        "harness": {"results": rows},
        "loss-by-position": [{"model": model, "buckets": buckets}],
    }
    path.write_text(json.dumps(values))
    return path


def test_scores_are_averaged_with_their_deviation_as_by_hand(tmp_path):
    files = [
        results(tmp_path / f"{n}.json", f"step-{n}", vt, loss)
        for n, (vt, loss) in enumerate([(60.0, 3.0), (63.0, 3.2), (69.0, 3.4)])
    ]
    found = {score.name: score for score in average_scores(files)}
    assert found["ruler_vt/4096"].mean == pytest.approx(64.0)
    assert found["ruler_vt/4096"].deviation == pytest.approx(21.0**0.5)  # (16 + 1 + 25) / 2
    assert found["hellaswag"].deviation == 0 and found["hellaswag"].count == 3
    assert found["loss-by-position/0-1024"].mean == pytest.approx(3.2)
    assert found["loss-by-position/0-1024"].deviation == pytest.approx(0.2)
    assert len(found) == 3

    result = average("--scores", *files)
    assert result.exit_code == 0 and "ruler_vt/4096" in result.output and "64" in result.output
    values = json.loads(files[0].read_text())
    del values["harness"]["results"][0]
    files[0].write_text(json.dumps(values))
    assert "different scores: ruler_vt/4096" in average("--scores", *files).output
    files[0].write_text("{}")
    assert "holds no scores" in average("--scores", *files).output
    mixed = average("--scores", *files[1:], "--out", tmp_path / "mean", "--overwrite")
    assert mixed.exit_code == 2 and "--scores with --out, --overwrite" in mixed.output
    gone = average("--scores", *files[1:], tmp_path / "gone.json")
    assert gone.exit_code == 2 and "gone.json: no such file" in gone.output
