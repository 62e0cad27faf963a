"""ZeRO-3 parameters partitioned while they are loaded: the same model, one copy in the job."""

import pytest

from anchorcontext.errors import UserError
from anchorcontext.testing import run_distributed


def weights(rank, world_size, configs):
    """Of a job of each config, after one step; and what a rank held before it was partitioned."""
    from anchorcontext.train import job as jobs
    from anchorcontext.train.consolidate import gather_state_dict
    from anchorcontext.train.step import count_targets, plan_micro_batches, train_step
    from anchorcontext.watch.metrics import StepMeter

    held, build_model = [], jobs.build_model

    def watched(*args, **kwargs):
        model = build_model(*args, **kwargs)
        held.append(sum(p.numel() for p in model.parameters() if not p.is_meta))
        return model

    jobs.build_model = watched
    found = []
    for config in configs:
        job = jobs.Job(config)
        before = gather_state_dict(job.engine)
        batches = job.next_micro_batches()
        plans = plan_micro_batches(batches, job.mesh, config.attention, job.control)
        train_step(job.engine, plans, count_targets(batches, job.mesh, job.control), StepMeter())
        found.append((before, gather_state_dict(job.engine), job.cost))
        job.engine.destroy()
        job.loader.close()
    return found, held


@pytest.fixture
def folder(tmp_path):
    from anchorcontext.testing.models import tiny_llama

    path = tmp_path / "model"
    tiny_llama(tie_word_embeddings=True, num_hidden_layers=2).save_pretrained(path)
    return str(path)


def test_weights_are_those_of_the_ordinary_load_bit_for_bit(tiny, folder):
    import torch

    models = [{"dtype": "bf16"}, {"dtype": "fp32", "path": folder, "scratch": None}]
    configs = [
        tiny(model=model, train={"zero_stage": 3, "partitioned_init": parts, "windows_per_step": 2})
        for model in models
        for parts in (False, True)
    ]
    ranks = run_distributed(weights, 2, configs)
    found, held = ranks[0]
    for ordinary, parts in zip(found[::2], found[1::2], strict=True):
        assert ordinary[2] == parts[2], "the sizes are those of the whole model"
        for theirs, ours in zip(ordinary[:2], parts[:2], strict=True):
            assert theirs.keys() == ours.keys()
            for name, weight in theirs.items():
                assert weight.dtype == ours[name].dtype and torch.equal(weight, ours[name]), name
        assert any(not torch.equal(parts[0][name], parts[1][name]) for name in parts[0])
    assert held[0] == held[1] > 0
    assert ranks[1][1][1::2] == [0, 0], "rank 1 holds no weight before it gets its part"


def untied(rank, world_size, config):
    from anchorcontext.train.job import Job

    try:
        Job(config)
    except UserError as error:
        return str(error)
    return None


def test_a_folder_whose_head_is_not_tied_as_it_says_is_refused_on_every_rank(tiny, folder):
    import json
    from pathlib import Path

    from safetensors.torch import load_file, save_file

    path = Path(folder) / "model.safetensors"
    state = load_file(path)
    state["lm_head.weight"] = state["model.embed_tokens.weight"] * 2
    save_file(state, path, metadata={"format": "pt"})
    assert json.loads((Path(folder) / "config.json").read_text())["tie_word_embeddings"]
    config = tiny(
        model={"path": folder, "scratch": None},
        train={"zero_stage": 3, "partitioned_init": True, "windows_per_step": 2},
    )
    for message in run_distributed(untied, 2, config):
        assert message is not None and "lm_head.weight" in message, message
