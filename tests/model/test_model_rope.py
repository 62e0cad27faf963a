"""RoPE through the config: old, new and mixed configs, every scaling type, casts of the model."""

import copy
import json

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from anchorcontext import UserError
from anchorcontext.model import (
    TrainModel,
    cast_parameters,
    configure_rope,
    enable,
    expected_inv_freq,
    fix_rotary_buffers,
    verify_rope,
)
from anchorcontext.model.rope import check_theta_sources
from anchorcontext.testing.models import TINY, tiny_llama

SHAPE = {key: value for key, value in TINY.items() if key != "rope_parameters"}
BASES = {
    "old": {"rope_theta": 5e5},
    "old with scaling": {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "new": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "mixed": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
}
OVERRIDES = {
    "theta": {"theta": 1e7},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 4.0},
    "default": {"rope_type": "default", "theta": 5e6},
}


def inv_freq_of(config):
    return AutoModelForCausalLM.from_config(config).model.rotary_emb.inv_freq.double().numpy()


def by_hand(theta, dim=16):
    return np.array([theta ** (-2 * i / dim) for i in range(dim // 2)])


@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("base", BASES)
def test_hazard_27_an_override_really_changes_the_live_table(base, override, tmp_path):
    config = LlamaConfig(**SHAPE, **copy.deepcopy(BASES[base]))
    before = inv_freq_of(config)
    configure_rope(config, **OVERRIDES[override], max_position_embeddings=16384)
    model = AutoModelForCausalLM.from_config(config)
    verify_rope(model, config)
    after = model.model.rotary_emb.inv_freq.double().numpy()
    assert not np.allclose(before, after, rtol=1e-3)

    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.rope_parameters == config.rope_parameters
    assert again.max_position_embeddings == 16384
    assert np.array_equal(inv_freq_of(again), after)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "rope_theta" not in saved and "rope_scaling" not in saved


def test_the_tables_by_hand():
    config = LlamaConfig(**SHAPE, **copy.deepcopy(BASES["old"]))
    assert np.allclose(inv_freq_of(config), by_hand(5e5), rtol=1e-6)
    linear = copy.deepcopy(config)
    configure_rope(linear, rope_type="linear", factor=4)
    assert np.allclose(inv_freq_of(linear), by_hand(5e5) / 4, rtol=1e-6)
    yarn = copy.deepcopy(config)
    configure_rope(yarn, rope_type="yarn", factor=4, max_position_embeddings=16384)
    table = inv_freq_of(yarn)
    assert table[0] == 1.0
    assert np.allclose(table[-1], by_hand(5e5)[-1] / 4, rtol=1e-6)
    assert expected_inv_freq(yarn)[1] == pytest.approx(0.1 * np.log(4) + 1)


def test_scaling_starts_from_the_length_the_model_was_trained_at():
    """transformers would take the new max_position_embeddings for the original length."""
    config = LlamaConfig(**SHAPE, **copy.deepcopy(BASES["new"]))
    configure_rope(config, rope_type="yarn", factor=4, max_position_embeddings=16384)
    assert config.rope_parameters["original_max_position_embeddings"] == 4096


def test_the_scaling_of_a_checkpoint_stays_when_only_its_base_changes():
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(**{**SHAPE, "max_position_embeddings": 131072}, rope_parameters=rope)
    configure_rope(config, theta=1e7)
    assert config.rope_parameters == {**rope, "rope_theta": 1e7}


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"rope_type": "linear"}, "needs model.rope.factor"),
        ({"factor": 4.0}, "no effect"),
        ({"rope_type": "longrope"}, "cannot be verified"),
        ({"rope_type": "dynamic", "factor": 4.0, "max_position_embeddings": 16384}, "theta"),
    ],
)
def test_settings_without_effect_or_meaning_are_refused(settings, named):
    config = LlamaConfig(**SHAPE, **copy.deepcopy(BASES["new"]))
    with pytest.raises(UserError, match=named):
        configure_rope(config, **settings)


def test_the_base_that_dynamic_scaling_arrives_at_gives_its_table():
    """What the refusal of `dynamic` proposes is what transformers would compute."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    dynamic = LlamaConfig(**SHAPE, rope_parameters=rope)
    rotary = AutoModelForCausalLM.from_config(dynamic).model.rotary_emb
    rotary(torch.zeros(1, 1), torch.tensor([[16383]]))
    with pytest.raises(UserError, match="theta") as error:
        configure_rope(
            LlamaConfig(**SHAPE, rope_parameters=dict(rope)), max_position_embeddings=16384
        )
    theta = float(str(error.value).split("model.rope.theta: ")[1].split(",")[0])
    assert np.allclose(rotary.inv_freq.double().numpy(), by_hand(theta), rtol=1e-6)


def test_dynamic_scaling_within_the_original_length_is_the_default_table():
    config = LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    )
    configure_rope(config)
    verify_rope(AutoModelForCausalLM.from_config(config), config)


def test_a_config_edited_after_the_model_was_built_is_noticed():
    model = tiny_llama()
    verify_rope(model)
    model.config.rope_parameters["rope_theta"] = 5e5
    assert tiny_llama().config.rope_parameters["rope_theta"] == 1e4
    with pytest.raises(UserError, match="built before the config was set"):
        verify_rope(model)


@pytest.mark.parametrize(
    "raw, named",
    [
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "several RoPE bases"),
        (
            {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"type": "linear"}},
            "would lose the base",
        ),
    ],
)
def test_contradicting_config_files_are_refused_until_the_base_is_said(raw, named):
    with pytest.raises(UserError, match=named):
        check_theta_sources(raw, None, "config.json")
    check_theta_sources(raw, 1e6, "config.json")


def test_consistent_config_files_pass():
    for raw in (
        {},
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": None, "rope_parameters": {"rope_theta": 5e5}},
    ):
        check_theta_sources(raw, None, "config.json")


CASTS = {
    "to": lambda model: model.to(torch.bfloat16),
    "bfloat16": lambda model: model.bfloat16(),
    "half": lambda model: model.half(),
    "to and back": lambda model: model.to(torch.bfloat16).to(torch.float32),
}


@pytest.mark.parametrize("cast", CASTS)
def test_hazard_24_the_train_model_keeps_its_tables_through_every_cast(cast):
    model = enable(tiny_llama())
    expected = model.model.rotary_emb.inv_freq.clone()
    train_model = CASTS[cast](TrainModel(model))
    rotary = model.model.rotary_emb
    assert model.lm_head.weight.dtype == (torch.float32 if "back" in cast else model.dtype)
    assert rotary.inv_freq.dtype == rotary.original_inv_freq.dtype == torch.float32
    assert torch.equal(rotary.inv_freq, expected)
    assert torch.equal(rotary.original_inv_freq, expected)
    verify_rope(train_model)
    assert "inv_freq" not in " ".join(train_model.state_dict())


def test_hazard_24_a_rounded_table_is_noticed_and_mended_bit_for_bit():
    model = tiny_llama()
    expected = model.model.rotary_emb.inv_freq.clone()
    model.to(torch.bfloat16)
    with pytest.raises(UserError, match="bfloat16"):
        verify_rope(model)
    fix_rotary_buffers(model)
    assert torch.equal(model.model.rotary_emb.inv_freq, expected)
    verify_rope(model)
    model.to(torch.bfloat16).to(torch.float32)
    with pytest.raises(UserError, match="inv_freq"):
        verify_rope(model)


def test_hazard_24_casting_the_parameters_leaves_the_tables():
    model = cast_parameters(tiny_llama(), torch.bfloat16)
    assert model.dtype == torch.bfloat16
    verify_rope(model)


def test_hazard_24_loading_in_bf16_leaves_the_tables(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    verify_rope(model)


def test_hazard_23_positions_beyond_the_bf16_grid_stay_apart():
    """cos and sin of positions 4096 and 4097 differ in a bf16 model."""
    model = cast_parameters(tiny_llama(), torch.bfloat16)
    positions = torch.tensor([[257, 256, 4097, 4096, 131071, 131070]])
    cos, sin = model.model.rotary_emb(torch.zeros(1, 1, dtype=torch.bfloat16), positions)
    table = torch.cat([cos, sin], dim=-1)[0]
    assert len(torch.unique(table, dim=0)) == 6
