"""The costs that train, parity, plan and inspect minimise are the config's: model and hardware."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from anchorcontext.config import load_config
from anchorcontext.errors import UserError
from anchorcontext.hardware import load_hardware
from anchorcontext.plan import CostModel
from anchorcontext.testing import run_distributed
from anchorcontext.train.costs import cost_model
from anchorcontext.train.job import Job
from anchorcontext.train.step import plan_micro_batches
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
    return load_config(DEMO, ["model.dtype=bf16", "parallel.hardware=h100", *overrides])


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


def planned_ahead(rank, world_size, config):
    """Which threads made plans, and what was left of them."""
    from anchorcontext.plan import cache  # the rank's own, not one that travels here

    made_by, make = [], cache.plan_batch

    def recorded(*arguments, **options):
        made_by.append(threading.current_thread().name)
        return make(*arguments, **options)

    job = Job(config)
    cache.plan_batch = recorded
    for _ in range(2):
        coming = job.next_micro_batches()
        plans = plan_micro_batches(coming, job.mesh, config.attention, job.control, job.cost)
    same = all(plan.windows == tuple(windows) for plan, windows in zip(plans, coming, strict=True))
    job.close()
    left = [t for t in threading.enumerate() if t.name.startswith("anchorcontext-data")]
    return made_by, len(left), same, job.cost


def test_a_step_finds_the_plans_of_its_micro_batches_made(tiny):
    """On two ranks alike: the same costs, no plan made in the step, no thread left."""
    config = tiny(parallel={"sp": 2}, train={"windows_per_step": 2})
    first, second = run_distributed(planned_ahead, 2, config)
    made_by, left, same_windows, cost = first
    assert len(made_by) >= 4 and all(name.startswith("anchorcontext-data") for name in made_by)
    assert (left, same_windows) == (0, True)
    assert cost == second[-1] and cost.heads == (4, 2)
