"""TrainModel in DeepSpeed engines: partitioned and tied heads, casts that leave RoPE alone."""

import pytest

from anchorcontext.testing import run_distributed

# DeepSpeed imports the second one while it builds its first engine.
PRELOAD = ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer")
CASES = [  # ZeRO stage, tied head, dtype
    (1, False, "bf16"),
    (1, True, "fp32"),
    (3, False, "fp32"),
    (3, True, "fp32"),
    (3, True, "bf16"),
]


def reference(tied, dtype):
    import torch

    from anchorcontext.testing.models import stock_loss, tiny_llama

    model = tiny_llama(tie_word_embeddings=tied)
    if dtype == "bf16":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    window = make_window()
    (stock_loss(model, window) / window.num_targets).backward()
    return {name: torch.clone(p.grad) for name, p in model.named_parameters()}


def make_window():
    import numpy as np

    from anchorcontext import Window

    rng = np.random.default_rng(0)
    documents = [rng.integers(3, 128, size=n) for n in (7, 13, 5, 23, 16)]
    return Window.from_documents(documents, anchor_id=1, mode="anchor")


def job(rank, world_size, cases):
    import logging

    import deepspeed
    import torch
    import torch.distributed as dist
    from deepspeed.utils import safe_get_full_grad

    from anchorcontext import enable, make_plan, shard
    from anchorcontext.model import PREFIX, TrainModel, verify_rope
    from anchorcontext.model.memory import checkpoint_layers
    from anchorcontext.testing.models import tiny_llama
    from anchorcontext.train.engine import without_compiled_operators

    without_compiled_operators()  # a compilation that was killed would leave a lock behind
    logging.disable(logging.WARNING)
    window = make_window()
    plan = make_plan(window, dist.group.WORLD)
    local = shard(window, plan)
    results = []
    for stage, tied, dtype in cases:
        model = enable(tiny_llama(tie_word_embeddings=tied))
        checkpoint_layers(model)
        table = model.model.rotary_emb.inv_freq.clone()
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": dtype == "bf16"},
        }
        engine, *_ = deepspeed.initialize(model=TrainModel(model, 8), config=config)
        gradients = []
        for _ in range(2):
            loss, targets = engine(local.input_ids, local.position_ids, local.labels, plan)
            engine.backward(loss * world_size / window.num_targets)
            gradients.append(
                {
                    name.removeprefix(PREFIX): safe_get_full_grad(parameter).float().clone()
                    for name, parameter in engine.module.named_parameters()
                }
            )
            engine.step()
        verify_rope(model)
        assert torch.equal(model.model.rotary_emb.inv_freq, table)
        with torch.no_grad():
            hidden = engine.module.hidden_states(local.input_ids, local.position_ids, plan)
            logits = [chunk for _, chunk in engine.module.logits_chunks(hidden, 8)]
        shape = tuple(torch.cat(logits, dim=1).shape)
        results.append((loss.dtype, int(targets), gradients, shape))
        engine.destroy()
    return results


@pytest.mark.slow
def test_gradients_under_zero_equal_one_process():
    ranks = run_distributed(job, 2, CASES, timeout=240, group_timeout=60.0, preload=PRELOAD)
    for case, results in zip(CASES, zip(*ranks, strict=True), strict=True):
        _, tied, dtype = case
        expected = reference(tied, dtype)
        assert sum(targets for _, targets, _, _ in results) == make_window().num_targets
        for loss_dtype, _, both_steps, shape in results:
            assert str(loss_dtype) == "torch.float32"
            assert shape == (1, -(-make_window().num_tokens // 2), 128)
            for gradients in both_steps:
                assert gradients.keys() == expected.keys()
                for name, theirs in expected.items():
                    error = (gradients[name] - theirs).abs()
                    if dtype == "fp32":
                        assert (error <= 1e-6 + 1e-4 * theirs.abs()).all(), (case, name)
                    else:
                        assert error.norm() <= 0.05 * theirs.norm(), (case, name)
