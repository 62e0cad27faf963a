"""`export` on a run's folder: which checkpoint, which config, which tokenizer, which dtype."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from anchorcontext.cli import group
from anchorcontext.config import load_config
from anchorcontext.model import build_model, load
from anchorcontext.train import export as train_export
from anchorcontext.train.checkpoint_files import write_manifest

SCRATCH = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIG = f"""\
run: {{name: tiny}}
model:
  dtype: bf16
  scratch: {json.dumps(SCRATCH)}
  rope: {{theta: 5.0e+6}}
data: {{path: %(data)s, tokenizer: %(data)s/tokenizer, window_tokens: 8192}}
train: {{steps: 4, windows_per_step: 1}}
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with two complete checkpoints and a torn one; its weights are those of its seed."""
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "<s>": 2, "</s>": 3}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(tmp_path / "windows" / "tokenizer")
    for name in ("step-000002", "step-000010", "step-000012.tmp"):
        folder = tmp_path / "runs" / "tiny" / "checkpoints" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(CONFIG % {"data": tmp_path / "windows"})
        model_of(folder, window_tokens=8192).config.save_pretrained(folder / "hf")
        write_manifest(folder, {"step": int(name[5:11]), "layout": {}})

    def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
        seed = int(Path(checkpoint).name[5:])
        return dict(model_of(checkpoint, window_tokens=8, seed=seed).state_dict())

    monkeypatch.setattr(train_export, "load_consolidated_state_dict", weights)
    return tmp_path / "runs" / "tiny"


def model_of(checkpoint: Path, window_tokens: int, seed: int = 0):
    """A model like the one that the config in the checkpoint describes, fp32."""
    section = load_config(Path(checkpoint) / "config.yaml").model
    section = section.model_copy(update={"dtype": "fp32", "path": None, "scratch": SCRATCH})
    return build_model(section, window_tokens=window_tokens, seed=seed, vocab_size=300)


def export(*arguments: object):
    return CliRunner().invoke(group, ["export", *map(str, arguments)])


def test_a_run_exports_its_latest_complete_checkpoint(run, tmp_path):
    result = export(run, tmp_path / "out", "--json", tmp_path / "report.json")
    assert result.exit_code == 0, result.output
    assert "step-000010" in result.output
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert model.config.vocab_size == 300
    assert model.config.rope_parameters["rope_theta"] == 5e6
    assert model.config.max_position_embeddings == 8192
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert (model.config.bos_token_id, model.config.eos_token_id) == (2, 3)
    assert model.generation_config.eos_token_id == 3
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["num_tensors"] == 21 and report["dtype"] == "bfloat16"


def test_one_checkpoint_and_another_dtype(run, tmp_path):
    checkpoint = run / "checkpoints" / "step-000002"
    result = export(checkpoint, tmp_path / "out", "--dtype", "fp32")
    assert result.exit_code == 0, result.output
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = train_export.load_consolidated_state_dict(checkpoint)
    assert model.dtype == torch.float32
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, expected[name])


def test_a_pretrained_run_needs_neither_its_base_model_nor_its_data(run, tmp_path):
    checkpoint = run / "checkpoints" / "step-000010"
    config = (checkpoint / "config.yaml").read_text()
    config = config.replace(f"scratch: {json.dumps(SCRATCH)}", "path: /gone/base")
    (checkpoint / "config.yaml").write_text(config.replace(str(tmp_path / "windows"), "/gone/data"))
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint, {"step": 10, "layout": {}})
    result = export(checkpoint, tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "without a tokenizer" in result.output
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.rope_parameters["rope_theta"] == 5e6
    assert model.config.max_position_embeddings == 8192


def test_an_existing_folder_is_not_overwritten_by_accident(run, tmp_path):
    (tmp_path / "out").mkdir()
    assert export(run, tmp_path / "out").exit_code == 2
    assert export(run, tmp_path / "out", "--overwrite").exit_code == 0


def test_a_folder_without_a_checkpoint_is_named(tmp_path):
    result = export(tmp_path, tmp_path / "out")
    assert result.exit_code == 2
    assert "no complete checkpoint" in result.output


def test_import_gguf_names_what_it_cannot_find(tmp_path):
    result = CliRunner().invoke(group, ["import-gguf", "no-such-package", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "no-such-package" in result.output


def test_the_dtypes_offered_are_those_of_the_config():
    assert set(load.DTYPES) == {"fp32", "bf16"}
