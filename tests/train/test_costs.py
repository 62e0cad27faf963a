"""The costs that train, parity, plan and inspect minimise are the config's: model and hardware."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from anchorcontext.config import load_config
from anchorcontext.errors import UserError
from anchorcontext.hardware import load_hardware
from anchorcontext.plan import CostModel
from anchorcontext.train.costs import cost_model
from anchorcontext.watch.sizes import model_sizes, sizes_of

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"
LLAMA3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
    "vocab_size": 64,
}


def demo(*overrides):
    return load_config(DEMO, ["model.dtype=bf16", *overrides])


def test_the_defaults_are_the_costs_of_an_8b_model_on_h100s_across_nodes():
    """Weights of a layer are counted from the model, its head left out."""
    sizes = model_sizes(LlamaConfig(**LLAMA3_8B))
    cost = cost_model(demo("parallel.sp=16", "parallel.hardware=h100"), sizes)
    ours = CostModel(
        heads=(32, 8), flops_per_second=0.4 * 989e12, attention_flops_per_second=0.4 * 989e12,
        seconds_per_message=5e-6,
    )  # fmt: skip
    assert cost == ours


def test_recomputation_dtype_and_heads_reach_the_costs():
    sizes = model_sizes(LlamaConfig(**LLAMA3_8B | {"num_key_value_heads": 4}))
    once = cost_model(demo(), sizes)
    twice = cost_model(demo("model.gradient_checkpointing=true"), sizes)
    assert twice.flops_per_token == once.flops_per_token * 4 / 3
    assert (once.messages_per_peer, twice.messages_per_peer) == (3, 4)
    row = 2 * 4 * 128
    assert once.bytes_per_row == row * (2 * 2 + 4) and twice.bytes_per_row == row * (3 * 2 + 4)
    fp32 = cost_model(demo("model.dtype=fp32"), sizes)
    assert fp32.bytes_per_row == row * 12 and fp32.memory_per_row == row * 4
    assert fp32.seconds_per_token > once.seconds_per_token
    assert once.heads == (32, 4)


@pytest.mark.parametrize(
    ("sp", "inside"), [(1, True), (4, True), (8, True), (6, False), (16, False)]
)
def test_rows_travel_in_the_node_where_every_group_lies_in_one(sp, inside):
    hardware = load_hardware("h100")
    cost = cost_model(demo(f"parallel.sp={sp}"), model_sizes(LlamaConfig(**LLAMA3_8B)), hardware)
    rates = hardware.network_bytes_per_second, hardware.node_bytes_per_second
    assert cost.bytes_per_second == rates[inside]


def test_the_memory_of_an_exchange_is_a_share_of_the_devices_or_the_configs():
    sizes = model_sizes(LlamaConfig(**LLAMA3_8B))
    assert cost_model(demo("parallel.hardware=h200"), sizes).exchange_memory == 0.05 * 141e9
    assert cost_model(demo("parallel.exchange_memory=1e9"), sizes).exchange_memory == 1e9


def test_a_model_and_its_config_have_the_same_sizes():
    """Training counts the model it has, plan and inspect one that is never made."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=3, vocab_size=128, tie_word_embeddings=True,
    )  # fmt: skip
    assert sizes_of(LlamaForCausalLM(config)) == model_sizes(config)


def test_an_unknown_hardware_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match=r"hardware 'h10'.*did you mean 'h100'"):
        cost_model(demo("parallel.hardware=h10"), model_sizes(LlamaConfig(**LLAMA3_8B)))
