"""A run goes on under other ranks, another sp, another ZeRO stage: the loss curve stays the same.

Every cell trains two steps, saves, and goes on under another layout to the fourth step. The oracle
is one process that was never interrupted: data order, learning rates and losses must be its own.
"""

import shutil
from pathlib import Path

import pytest
import torch

from anchorcontext.testing import run_distributed
from anchorcontext.train.checkpoint_files import read_checkpoint
from anchorcontext.train.consolidate import gather_state_dict
from anchorcontext.train.loop import Trainer
from anchorcontext.train.shards import SavedEngine

STEPS, SAVED = 4, 2
# (dp, sp) before -> after.
LAYOUTS = [((1, 2), (2, 1)), ((2, 2), (1, 2)), ((1, 1), (1, 4))]
CELLS = [
    *[(before, after, stage, stage, "fp32") for before, after in LAYOUTS for stage in range(4)],
    *[((1, 2), (2, 1), *stages, "fp32") for stages in [(0, 3), (3, 1), (2, 0)]],
    *[((1, 2), (2, 1), *stages, "bf16") for stages in [(1, 3), (3, 0)]],
]


def run_all(rank, world_size, jobs):
    """Run each config to a step, from where its folder says; save unless it is the last step."""
    found = {}
    for key, (config, until) in jobs.items():
        trainer = Trainer(config)
        records = [trainer.run_step() for _ in range(until - trainer.step)]
        if until < STEPS:
            trainer.save()
        curve = [(r.loss, r.grad_norm, r.lr, r.windows) for r in records]
        found[key] = (curve, gather_state_dict(trainer.job.engine))
        trainer.sinks.close()
        trainer.job.loader.close()
        trainer.job.engine.destroy()
    return found if rank == 0 else {}


def by_world(jobs):
    """The jobs of every number of ranks in one launch."""
    found = {}
    for world in sorted({dp * sp for (dp, sp), *_ in jobs.values()}):
        mine = {key: job[1:] for key, job in jobs.items() if job[0][0] * job[0][1] == world}
        found |= run_distributed(run_all, world, mine, timeout=400.0, group_timeout=100.0)[0]
    return found


def test_ranks_sp_and_stage_may_change_between_two_steps(tiny):
    def config(name, sp, stage, dtype):
        return tiny(
            run={"name": name},
            model={"dtype": dtype},
            parallel={"sp": sp},
            train={"steps": STEPS, "zero_stage": stage},
            schedule={"type": "cosine", "warmup_steps": 1},
            watch={"progress": False},
        )

    def folder(name):
        return Path(config(name, 1, 0, "fp32").run.output_dir) / name

    oracle = {d: ((1, 1), config(f"oracle-{d}", 1, 0, d), STEPS) for d in ("fp32", "bf16")}
    first = {
        (at, stage, dtype): (at, config(f"{at}-{stage}-{dtype}", at[1], stage, dtype))
        for at, _, stage, _, dtype in CELLS
    }
    started = by_world(oracle | {key: (*job, SAVED) for key, job in first.items()})
    second = {}
    for number, (before, after, stage, new_stage, dtype) in enumerate(CELLS):
        source = first[before, stage, dtype][1]
        shutil.copytree(folder(source.run.name), folder(f"cell-{number}"))
        second[number] = (after, config(f"cell-{number}", after[1], new_stage, dtype), STEPS)
    resumed = by_world(second)

    for number, cell in enumerate(CELLS):
        before, _, stage, _, dtype = cell
        loss_tolerance, weight_tolerance = (2e-6, 1e-6) if dtype == "fp32" else (2e-3, 2e-3)
        expected, true_weights = started[dtype]
        curve, weights = resumed[number]
        whole = [*started[before, stage, dtype][0], *curve]
        assert len(whole) == STEPS, cell
        for (loss, norm, lr, windows), (true_loss, true_norm, true_lr, true_windows) in zip(
            whole, expected, strict=True
        ):
            assert (lr, windows) == (true_lr, true_windows), cell
            assert loss == pytest.approx(true_loss, rel=loss_tolerance), cell
            assert norm == pytest.approx(true_norm, rel=20 * loss_tolerance), cell
        for name, weight in weights.items():
            # On average: Adam turns a gradient of the size of its eps, which is rounding, into a
            # step of either sign. One step moves a weight by lr = 1e-2.
            distance = float((weight - true_weights[name]).abs().mean())
            assert distance < weight_tolerance, (cell, name)


def move(rank, world_size, configs):
    """Resume under another layout and save at once."""
    for config in configs:
        trainer = Trainer(config)
        assert trainer.step == SAVED
        trainer.save()
        trainer.sinks.close()
        trainer.job.loader.close()
        trainer.job.engine.destroy()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_state_moves_through_all_stages_bit_for_bit(tiny, dtype):
    """From one rank to three, where flat groups and pieces are padded, through every stage, to the
    host's memory and back."""

    def config(sp, stage, offload="none"):
        return tiny(
            run={"name": "moved"},
            model={"dtype": dtype},
            parallel={"sp": sp},
            train={"steps": STEPS, "zero_stage": stage, "offload_optimizer": offload},
        )

    first = config(1, 0)
    run_distributed(run_all, 1, {0: (first, SAVED)})
    path = Path(first.run.output_dir) / "moved" / "checkpoints" / f"step-{SAVED:06d}"

    def states():
        saved = SavedEngine(read_checkpoint(path))
        copies = {
            state.name: [state.master.clone(), state.step]
            + [state.moments[key].clone() for key in ("exp_avg", "exp_avg_sq")]
            for state in saved.parameters()
        }
        return copies, saved.schedule, saved.counters

    expected = states()
    assert len(expected[0]) == 21 and all(state[1] == SAVED for state in expected[0].values())
    way = [(1,), (1, "cpu"), (3, "cpu"), (2,), (0,), (3,)]
    run_distributed(move, 3, [config(3, *step) for step in way], timeout=300.0)
    found = states()
    assert found[1:] == expected[1:]
    assert found[0].keys() == expected[0].keys()
    for name, state in expected[0].items():
        for true, value in zip(state, found[0][name], strict=True):
            assert torch.equal(torch.as_tensor(true), torch.as_tensor(value)), name
