"""What DeepSpeed is told: our options, the pass-through section, parameter groups, offload."""

import pytest
import torch
from torch import nn

from anchorcontext.errors import UserError
from anchorcontext.model import TrainModel, build_model
from anchorcontext.parallel import build_mesh
from anchorcontext.testing import run_distributed
from anchorcontext.train.consolidate import gather_state_dict
from anchorcontext.train.control import Control
from anchorcontext.train.engine import build_engine, deepspeed_config, parameter_groups
from anchorcontext.train.job import build_loader, open_dataset
from anchorcontext.train.step import count_targets, plan_micro_batches, train_step
from anchorcontext.watch.metrics import StepMeter

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_sees_data_parallel_ranks_only(tiny, stage):
    options = deepspeed_config(tiny(parallel={"sp": 2}, train={"zero_stage": stage}), 4, CPU)
    assert options["zero_optimization"] == {"stage": stage}
    assert options["gradient_accumulation_steps"] == 2
    assert not {"sequence_parallel_size", "tensor_parallel", "mpu"} & options.keys()


def test_bf16_accumulates_and_reduces_in_fp32_unless_told_otherwise(tiny):
    options = deepspeed_config(tiny(model={"dtype": "bf16"}), 1, CPU)
    assert options["bf16"]["enabled"] and options["communication_data_type"] == "fp32"
    assert options["data_types"]["grad_accum_dtype"] == "fp32"
    told = tiny(model={"dtype": "bf16"}, deepspeed={"communication_data_type": "bf16"})
    assert deepspeed_config(told, 1, CPU)["communication_data_type"] == "bf16"
    assert "bf16" not in deepspeed_config(tiny(), 1, CPU)


def test_the_optimiser_needs_no_compiler_except_for_offload(tiny):
    params = deepspeed_config(tiny(), 1, CPU)["optimizer"]["params"]
    assert params["torch_adam"] and params["betas"] == [0.9, 0.95]
    assert deepspeed_config(tiny(), 1, CUDA)["optimizer"]["params"]["fused"]
    offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    given = deepspeed_config(tiny(deepspeed=offload), 1, CUDA)
    assert "torch_adam" not in given["optimizer"]["params"]
    assert given["zero_optimization"] == {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    ours = deepspeed_config(tiny(train={"offload_optimizer": "cpu"}), 1, CUDA)
    assert "torch_adam" not in ours["optimizer"]["params"]
    pinned = {"device": "cpu", "pin_memory": True}
    assert ours["zero_optimization"] == {"stage": 1, "offload_optimizer": pinned}


def test_deepspeed_does_not_wait_for_the_device_to_measure_what_the_record_has(tiny):
    assert not deepspeed_config(tiny(), 1, CUDA)["timers"]["throughput"]["enabled"]
    wanted = tiny(deepspeed={"timers": {"throughput": {"enabled": True}}})
    assert deepspeed_config(wanted, 1, CUDA)["timers"]["throughput"]["enabled"]


def test_norms_and_biases_are_not_decayed():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    model[0].bias.requires_grad_(False)
    decayed, plain = parameter_groups(model, 0.1)
    assert [p.shape for p in decayed["params"]] == [(4, 3)] and decayed["weight_decay"] == 0.1
    assert len(plain["params"]) == 2 and plain["weight_decay"] == 0.0


def one_step(rank, world_size, configs):
    mesh, control = build_mesh(1), Control.create()
    weights = []
    for config in configs:
        model = build_model(config.model, window_tokens=24, vocab_size=128, probe=False)
        engine = build_engine(TrainModel(model), config, CPU)
        batches = [next(build_loader(config, open_dataset(config), mesh))]
        plans = plan_micro_batches(batches, mesh, config.attention, control)
        train_step(engine, plans, count_targets(batches, mesh, control), StepMeter())
        weights.append(gather_state_dict(engine))
        engine.destroy()
    return weights


def test_optimizer_offload_computes_the_same_by_our_key_and_deepspeeds(tiny):
    offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    configs = [
        tiny(train={"zero_stage": stage, "windows_per_step": 2, **train}, deepspeed=options)
        for stage, train, options in (
            (2, {}, {}),
            (2, {}, offload),
            (1, {"offload_optimizer": "cpu"}, {}),
            (3, {}, {}),
            (3, {"offload_optimizer": "cpu"}, {}),
        )
    ]
    weights = run_distributed(one_step, 2, configs)[0]
    # Adam's first step is lr * g / (|g| + eps): rounding shows where g is as small as eps.
    for other in weights[1:]:
        for name, weight in weights[0].items():
            torch.testing.assert_close(other[name], weight, rtol=0, atol=2e-5)


def refused(rank, world_size, config):
    model = build_model(config.model, window_tokens=24, vocab_size=128, probe=False)
    try:
        build_engine(TrainModel(model), config, CPU)
    except UserError as error:
        return str(error)
    return None


def test_an_option_deepspeed_does_not_know_is_refused_before_training(tiny):
    config = tiny(deepspeed={"zero_optimization": {"reduce_bucket_sise": 1000}})
    (message,) = run_distributed(refused, 1, config)
    assert "reduce_bucket_sise" in message and "deepspeed section" in message
