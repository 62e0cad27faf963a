"""What would silently be lost is refused by name, before any weight is loaded and at run time."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from anchorcontext import UserError, enable, make_plan, shard
from anchorcontext.model import (
    TrainModel,
    attention_forward,
    check_supported,
    configure_rope,
    probe_model,
)
from anchorcontext.testing.models import tiny_config, tiny_llama, tiny_model
from anchorcontext.window import Window

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    "model_type, keys, named",
    [
        ("mistral", {"sliding_window": 4}, "sliding_window = 4"),
        ("mistral", {}, "sliding_window = 4096"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "sliding_window = 8",
        ),
        ("gemma2", {"head_dim": 16}, "attn_logit_softcapping = 50.0"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ("cohere", {"logit_scale": 0.0625}, "logit_scale = 0.0625"),
        ("granite", {"logits_scaling": 8.0}, "logits_scaling = 8.0"),
        ("gpt_oss", {"head_dim": 16, "sliding_window": None}, "gpt_oss"),
        ("deepseek_v3", {}, "kv_lora_rank"),
        ("qwen3_next", {}, "linear_attention"),
        ("mixtral", {"output_router_logits": True}, "output_router_logits"),
    ],
)
def test_configs_are_refused_by_name(model_type, keys, named):
    config = AutoConfig.for_model(model_type, **{**SMALL, **keys})
    with pytest.raises(UserError, match=named) as error:
        check_supported(config)
    assert model_type in str(error.value) and ";" in str(error.value)


@pytest.mark.parametrize("model_type", ["bloom", "gpt2", "mpt"])
def test_models_without_rope_are_refused(model_type):
    with pytest.raises(UserError, match="positions must come from one RoPE"):
        configure_rope(AutoConfig.for_model(model_type))


def test_a_sliding_window_that_hides_nothing_is_allowed_when_that_is_proved():
    config = tiny_config("mistral", sliding_window=64)
    check_supported(config, window_tokens=64)
    with pytest.raises(UserError, match="windows have 65 tokens"):
        check_supported(config, window_tokens=65)
    with pytest.raises(UserError, match="sliding_window = 64"):
        check_supported(config)
    check_supported(tiny_config("qwen2", sliding_window=8, use_sliding_window=False))


def test_hazard_22_a_sliding_window_is_refused_when_the_model_is_enabled():
    with pytest.raises(UserError, match="sliding_window = 4"):
        enable(tiny_model("mistral", sliding_window=4))


def test_hazard_22_and_when_a_longer_window_comes_along():
    model = enable(tiny_model("mistral", sliding_window=8, max_position_embeddings=8))
    window = Window([1, *range(3, 12)], [0, 1, 10])
    plan = make_plan(window)
    local = shard(window, plan)
    with pytest.raises(UserError, match="sliding window of 8 tokens in a window of 10"):
        model(local.input_ids, position_ids=local.position_ids, plan=plan)


@pytest.mark.parametrize(
    "arguments, named",
    [
        ({"dropout": 0.1}, "dropout"),
        ({"softcap": 50.0}, "softcap"),
        ({"s_aux": torch.zeros(4)}, "sinks"),
        ({"sliding_window": 3}, "sliding window"),
        ({"is_causal": False}, "causal"),
        ({"position_bias": torch.zeros(1)}, "position bias"),
        ({"attention_mask": torch.zeros(1, 1, 5, 5)}, "attention_mask"),
        ({"plan": None}, "plan="),
    ],
)
def test_what_a_layer_asks_for_at_run_time_is_refused(arguments, named):
    window = Window([1, 3, 4, 5, 6], [0, 1, 5])
    plan = make_plan(window)
    q = torch.randn(1, 4, plan.local_length, 16)
    k = torch.randn(1, 2, plan.local_length, 16)
    module = tiny_llama().model.layers[0].self_attn
    out, weights = attention_forward(module, q, k, k, None, scaling=0.25, plan=plan)
    assert out.shape == (1, plan.local_length, 4, 16) and weights is None
    with pytest.raises(UserError, match=named):
        attention_forward(module, q, k, k, **{"scaling": 0.25, "plan": plan, **arguments})


def test_value_heads_of_another_size_and_past_keys_are_refused():
    window = Window([1, 3, 4, 5, 6], [0, 1, 5])
    plan = make_plan(window)
    module = tiny_llama().model.layers[0].self_attn
    q, k = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16)
    with pytest.raises(UserError, match="two head sizes"):
        attention_forward(module, q, k, torch.randn(1, 2, 5, 8), plan=plan)
    past = torch.randn(1, 2, 9, 16)
    with pytest.raises(UserError, match="5 queries and 9 keys"):
        attention_forward(module, q, past, past, plan=plan)


def test_a_model_outside_the_attention_interface_is_refused():
    model = tiny_llama()
    model.set_attn_implementation = lambda name: None
    with pytest.raises(UserError, match="attention interface"):
        enable(model)


def test_a_model_that_does_not_hand_the_plan_on_to_its_layers_is_refused():
    model = enable(AutoModelForCausalLM.from_config(AutoConfig.for_model("stablelm", **SMALL)))
    with pytest.raises(UserError, match="does not hand keyword arguments on"):
        probe_model(model)


def test_a_head_with_a_bias_is_refused():
    model = enable(tiny_llama())
    model.lm_head = torch.nn.Linear(64, 128, bias=True)
    with pytest.raises(UserError, match="without bias"):
        TrainModel(model)
