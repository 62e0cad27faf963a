"""Evaluation between steps: to every sink, at the same steps after a resume, nothing disturbed."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from anchorcontext.errors import UserError
from anchorcontext.testing import run_distributed
from anchorcontext.train.consolidate import gather_state_dict
from anchorcontext.train.dry_run import dry_run
from anchorcontext.train.loop import Trainer
from anchorcontext.watch.history import read_run
from anchorcontext.watch.jsonl import read_metrics
from anchorcontext.watch.run_figures import run_figures
from anchorcontext.watch.summary import summarize, summary_rows

LENGTHS = [60, 64]
FIGURES = [
    "held_out/60",
    "held_out/64",
    "loss_by_position/0-64",
    "niah_single/60",
    "niah_single/64",
]


def draws_when_evaluated(module, arguments):
    if not module.training:
        torch.rand(1), np.random.random(), random.random()


def trained(rank, world_size, configs):
    """Train each config, with a model that draws random numbers when it is evaluated; weights,
    random states, windows and steps of each."""
    found = []
    for config in configs:
        trainer = Trainer(config)
        trainer.job.engine.module.register_forward_pre_hook(draws_when_evaluated)
        report = trainer.run()
        weights = {name: w.numpy() for name, w in gather_state_dict(trainer.job.engine).items()}
        states = [torch.get_rng_state().numpy(), np.random.get_state()[1], random.getstate()]
        found.append((weights, states, trainer.job.loader.position, report.step))
        trainer.close()
    return found


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def evaluated(config):
    records, events = read_metrics(Path(config.run.output_dir) / config.run.name / "metrics.jsonl")
    return records, [event for event in events if event["event"] == "evaluation"]


def settings(tiny, name, stage=1, sp=1, trackers=False, **evaluate):
    tasks = ["held_out", "loss_by_position", "niah_single"]
    section = {"every": 3, "tasks": tasks, "lengths": LENGTHS, "windows": 3, **evaluate}
    return tiny(
        run={"name": name},
        data={"validation_fraction": 0.1},
        model={"gradient_checkpointing": True},
        parallel={"sp": sp},
        train={"steps": 4, "windows_per_step": 2, "zero_stage": stage},
        evaluate=section if evaluate.get("every", 3) else {},
        watch={"tensorboard": True, "wandb": {"mode": "offline"}} if trackers else {},
    )


def test_a_run_with_evaluation_is_the_run_without_it_bit_for_bit(tiny):
    configs = [
        settings(tiny, f"{stage}-{every}", stage, sp, every=every)
        for stage, sp in ((1, 1), (3, 2))
        for every in (None, 1)
    ]
    for found in run_distributed(trained, 2, configs, group_timeout=60.0, timeout=300.0):
        for (weights, states, position, _), (others, other_states, other_position, _) in (
            found[:2],
            found[2:],
        ):
            assert position == other_position == 8
            assert weights.keys() == others.keys()
            assert all(np.array_equal(weights[name], others[name]) for name in weights)
            assert same(states[:2], other_states[:2]) and states[2] == other_states[2]
    for config in configs:
        records, events = evaluated(config)
        every = config.evaluate.every
        assert [event["step"] for event in events] == ([0, 1, 2, 3, 4] if every else [])
        if not every:
            continue
        assert [record["seconds_evaluation"] > 0 for record in records] == [True] * 4
        spent = sum(event["seconds"] for event in events[:-1])
        assert sum(r["seconds_evaluation"] for r in records) == pytest.approx(spent, abs=0.01)
        for event in events:
            assert list(event["values"]) == FIGURES
            assert event["values"]["niah_single/60"] in [n / 10 for n in range(11)]
    # ZeRO-3 over two ranks of a window measures what ZeRO-1 over two windows does.
    first, second = (evaluated(configs[i])[1][0]["values"] for i in (1, 3))
    assert first == pytest.approx(second, rel=1e-6)


def test_a_resumed_run_evaluates_at_the_same_steps_and_every_sink_has_the_values(tiny):
    short = settings(tiny, "resumed", trackers=True)
    longer = short.model_copy(update={"train": short.train.model_copy(update={"steps": 7})})
    whole = longer.model_copy(update={"run": short.run.model_copy(update={"name": "whole"})})
    run_distributed(trained, 1, [short, longer, whole], group_timeout=60.0, timeout=300.0)
    events, expected = evaluated(longer)[1], evaluated(whole)[1]
    assert [event["step"] for event in events] == [0, 3, 4, 6, 7]
    assert [event["step"] for event in expected] == [0, 3, 6, 7]
    values = {event["step"]: event["values"] for event in events}
    assert all(values[event["step"]] == event["values"] for event in expected)

    folder = Path(longer.run.output_dir) / "resumed"
    figures = run_figures(read_run(folder))
    assert figures["Held-out loss by context length, nats a target"]
    assert figures["Held-out documents: loss by position"]
    assert figures["Needles found, by context length"]
    rows = dict(summary_rows(summarize(folder)))
    assert rows["evaluated, step 7"].startswith("held_out/60 ")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "tensorboard")).Reload()
    curve = {point.step: point.value for point in board.Scalars("evaluation/held_out/64")}
    assert curve == pytest.approx({s: v["held_out/64"] for s, v in values.items()}, rel=1e-6)


def test_a_dry_run_finds_what_the_data_cannot_serve(tiny):
    def errors(rank, world_size):
        found = []
        for tasks, lengths in ((["niah_single"], [8]), (["held_out", "loss_by_position"], [64])):
            section = {"every": 1, "tasks": tasks, "lengths": lengths}
            try:
                dry_run(tiny(data={"validation_fraction": 0.1}, evaluate=section))
            except UserError as error:
                found.append(str(error))
        return found

    (found,) = run_distributed(errors, 1, group_timeout=60.0)
    assert len(found) == 1 and "8 tokens has no room" in found[0]


def test_what_cannot_be_evaluated_is_refused_with_the_config(tiny):
    with pytest.raises(UserError, match=r"evaluate.lengths = \[65\].*data.window_tokens = 64"):
        tiny(data={"validation_fraction": 0.1}, evaluate={"every": 1, "lengths": [65]})
    with pytest.raises(UserError, match=r"data.validation_fraction = 0.*held out"):
        tiny(evaluate={"every": 1})
