"""Building the model of a config: from scratch and from a folder."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from anchorcontext import UserError
from anchorcontext.config.sections import ModelSection
from anchorcontext.model import build_config, build_model, verify_rope
from anchorcontext.testing.models import tiny_llama

SCRATCH = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def section(**values):
    return ModelSection.model_validate(values)


@pytest.fixture
def folder(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_model_from_scratch_is_the_same_for_the_same_seed():
    def weights(seed):
        torch.manual_seed(77)
        model = build_model(
            section(scratch=SCRATCH, dtype="fp32"), window_tokens=64, seed=seed, vocab_size=100
        )
        return model, model.model.embed_tokens.weight, float(torch.rand(()))

    first, again, other = weights(1), weights(1), weights(2)
    assert first[0].config.vocab_size == 100
    assert torch.equal(first[1], again[1]) and not torch.equal(first[1], other[1])
    assert first[2] == other[2], "building a model must not move the global generator"
    assert all(layer.gradient_checkpointing for layer in first[0].model.layers)
    assert first[0].config._attn_implementation == "anchorcontext"


def test_building_leaves_the_config_of_the_run_alone():
    """transformers writes into nested dictionaries; the run's config is saved and hashed."""
    scratch = {**SCRATCH, "rope_parameters": {"rope_theta": 5e5}}
    values = section(scratch=scratch, rope={"theta": 1e6})
    before = values.model_dump_json()
    config = build_config(values, window_tokens=64)
    assert config.rope_parameters["rope_theta"] == 1e6
    assert values.model_dump_json() == before


def test_a_bf16_model_from_scratch_is_the_fp32_one_rounded():
    fp32, bf16 = (
        build_model(section(scratch=SCRATCH, dtype=dtype), window_tokens=64, vocab_size=128)
        for dtype in ("fp32", "bf16")
    )
    assert bf16.dtype == torch.bfloat16
    for a, b in zip(fp32.parameters(), bf16.parameters(), strict=True):
        assert torch.equal(a.to(torch.bfloat16), b)
    verify_rope(bf16)


def test_a_folder_is_loaded_with_rope_set_before_and_verified_after(folder):
    model = build_model(
        section(path=str(folder), dtype="bf16", rope={"theta": 5e6}), window_tokens=65536
    )
    assert model.config.rope_parameters["rope_theta"] == 5e6
    assert model.config.max_position_embeddings == 65536
    assert model.dtype == torch.bfloat16
    expected = 5e6 ** (-2 / 16)
    assert abs(float(model.model.rotary_emb.inv_freq[1]) - expected) < 1e-7


def test_windows_longer_than_the_model_reaches_need_a_word(folder):
    with pytest.raises(UserError, match="reaches 4096 tokens"):
        build_config(section(path=str(folder)), window_tokens=4097)
    config = build_config(
        section(path=str(folder), max_position_embeddings=8192), window_tokens=4097
    )
    assert config.max_position_embeddings == 8192
    with pytest.raises(UserError, match="set it to at least 9000"):
        build_config(section(path=str(folder), max_position_embeddings=8192), window_tokens=9000)
    assert (
        build_config(section(path=str(folder)), window_tokens=100).max_position_embeddings == 4096
    )
    fresh = build_config(section(scratch=SCRATCH), window_tokens=65536)
    assert fresh.max_position_embeddings == 65536


def test_missing_and_left_over_weights_are_errors(folder):
    weights = load_file(folder / "model.safetensors")
    norm = weights.pop("model.norm.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"missing keys.*model\.norm\.weight"):
        build_model(section(path=str(folder)), window_tokens=64)
    weights |= {"model.norm.weight": norm, "model.extra.weight": norm.clone()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"unexpected keys.*model\.extra\.weight"):
        build_model(section(path=str(folder)), window_tokens=64)


def test_weights_of_another_shape_are_an_error(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"model\.norm\.weight|cannot be loaded"):
        build_model(section(path=str(folder)), window_tokens=64)


def test_contradicting_bases_in_the_folder_are_an_error(folder):
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "rope_theta": 5e5}))
    with pytest.raises(UserError, match="several RoPE bases"):
        build_config(section(path=str(folder)), window_tokens=64)


@pytest.mark.parametrize(
    "values, named",
    [
        ({"scratch": {**SCRATCH, "model_type": "lama"}}, "lama"),
        ({"scratch": {**SCRATCH, "hiden_size": 3}}, "hiden_size"),
        (
            {"scratch": {**SCRATCH, "pad_token_id": 128004}},
            r"pad_token_id = 128004.*set it to null",
        ),
        ({"scratch": {**SCRATCH, "vocab_size": 50}}, "tokenizer of 100"),
        ({"scratch": {**SCRATCH, "model_type": "mistral"}}, "sliding_window = 4096"),
        ({"scratch": {**SCRATCH, "num_attention_heads": 5}}, "not a multiple of the number of att"),
        ({"path": "/nowhere/at/all"}, "/nowhere/at/all: there is no such folder"),
    ],
)
def test_what_cannot_be_built_is_refused(values, named):
    with pytest.raises(UserError, match=named):
        build_config(section(**values), window_tokens=5000, vocab_size=100)


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        build_config(section(path=str(tmp_path)), window_tokens=64)


def test_a_tokenizer_larger_than_the_model_is_refused(folder):
    with pytest.raises(UserError, match="has 129 entries"):
        build_config(section(path=str(folder)), window_tokens=64, vocab_size=129)
