"""The memory levers under DeepSpeed's engines: the same step, the predicted bytes."""

from anchorcontext.testing import run_distributed

LEVERS = [
    {},
    {"gradient_checkpointing": True, "keep_attention": True, "offload_activations": True},
    {"gradient_checkpointing": True, "checkpoint_every": 2, "mlp_chunk_tokens": 5},
]


def steps(rank, world_size, configs):
    """Weights after two steps, bytes sent in attention and those predicted, of each config."""
    import torch

    from anchorcontext.model import TrainModel, build_model
    from anchorcontext.parallel import build_mesh
    from anchorcontext.train.consolidate import gather_state_dict
    from anchorcontext.train.control import Control
    from anchorcontext.train.costs import predicted_bytes
    from anchorcontext.train.engine import build_engine
    from anchorcontext.train.job import build_loader, open_dataset
    from anchorcontext.train.step import count_targets, plan_micro_batches, train_step
    from anchorcontext.watch.metrics import StepMeter
    from anchorcontext.watch.sizes import sizes_of

    mesh, control, found = build_mesh(2), Control.create(), []
    for config in configs:
        model = build_model(config.model, window_tokens=24, vocab_size=128, probe=False)
        sizes = sizes_of(model)
        engine = build_engine(TrainModel(model), config, torch.device("cpu"))
        loader = build_loader(config, open_dataset(config), mesh)
        sent = []
        for _ in range(2):
            batches = [next(loader)]
            plans = plan_micro_batches(batches, mesh, config.attention, control)
            train_step(engine, plans, count_targets(batches, mesh, control), StepMeter())
            counted = plans[0].meter.bytes_sent
            sent.append((counted, predicted_bytes(plans[0], config, sizes)))
        found.append((gather_state_dict(engine), sent))
        engine.destroy()
    return found


def test_levers_change_neither_the_step_nor_the_prediction(tiny):
    import torch

    configs = [
        tiny(
            model={**levers},
            optimizer={"type": "sgd", "lr": 0.1},
            parallel={"sp": 2},
            train={"zero_stage": stage, "windows_per_step": 1},
            deepspeed={"zero_optimization": {"stage3_param_persistence_threshold": 0}},
        )
        for stage in (2, 3)
        for levers in LEVERS
    ]
    ranks = run_distributed(steps, 2, configs)
    weights = [state for state, _ in ranks[0]]
    for other in weights[1:]:
        assert other.keys() == weights[0].keys()
        for name, weight in weights[0].items():
            torch.testing.assert_close(other[name], weight, rtol=1e-5, atol=1e-6)
    for found in ranks:
        for _, sent in found:
            assert all(counted == predicted > 0 for counted, predicted in sent)
    totals = [sum(found[index][1][0][0] for found in ranks) for index in range(3)]
    assert totals[1] == totals[0] < totals[2], "attention that is kept is not sent again"
