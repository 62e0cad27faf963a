"""The windows that the ranks of real runs read, over SIGKILLs and changes of dp and sp."""

import itertools
import json
import os
import signal
from pathlib import Path

import pytest

from anchorcontext.data import epoch_order
from anchorcontext.parallel import Mesh
from anchorcontext.testing import run_distributed
from anchorcontext.train.job import build_loader, open_dataset
from anchorcontext.train.loop import Trainer
from anchorcontext.watch.jsonl import read_metrics

NUM_WINDOWS, WINDOWS_PER_STEP, STEPS = 8, 6, 6


def trained_until_killed(rank, world_size, config, note, killed_at):
    """Train, and note what is read; ``killed_at`` (step, micro-batch): the last rank dies there."""
    trainer = Trainer(config)
    loader, read = trainer.job.loader, {"step": None}
    own = type(loader).__next__

    class Noting(type(loader)):
        def __next__(self):
            if trainer.step != read["step"]:
                read.update(step=trainer.step, number=0)
            if (trainer.step, read["number"]) == killed_at and rank == world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            windows = own(self)
            entry = [trainer.step, read["number"], trainer.mesh.dp_rank, self.last_ids]
            with open(f"{note}-{rank}.jsonl", "a") as file:
                file.write(json.dumps(entry) + "\n")
            read["number"] += 1
            return windows

    loader.__class__ = Noting
    trainer.run()
    trainer.close()


def read_by(note):
    """What SP groups read in each step of a life, in the order of global windows."""
    groups = {}
    for file in note.parent.glob(f"{note.name}-*.jsonl"):
        for line in file.read_text().splitlines():
            step, number, dp_rank, ids = json.loads(line)
            place = groups.setdefault(step, {}).setdefault((number, dp_rank), ids)
            assert place == ids, "the ranks of an SP group read the same windows"
    return {
        step: list(itertools.chain(*(read[place] for place in sorted(read))))
        for step, read in groups.items()
    }


def test_kills_inside_accumulation_and_at_an_epochs_edge_skip_and_repeat_no_window(tiny, tmp_path):
    """Steps of 6 over epochs of 8 windows: the third step goes over an edge, the fourth ends at
    one, and no epoch divides into steps."""

    def config(sp):
        return tiny(
            parallel={"sp": sp},
            train={"steps": STEPS, "windows_per_step": WINDOWS_PER_STEP},
            checkpoint={"every": 1},
        )

    lives = [  # dp, sp, (steps done, micro-batch) of the kill
        (2, 2, (2, 1)),
        (1, 2, (4, 0)),
        (2, 1, None),
    ]
    steps = {}
    for number, (dp, sp, killed_at) in enumerate(lives):
        note = tmp_path / f"life{number}"
        arguments = (dp * sp, config(sp), note, killed_at)
        if killed_at is None:
            run_distributed(trained_until_killed, *arguments)
        else:
            with pytest.raises(RuntimeError, match=rf"of {dp * sp} (failed|ended)"):
                run_distributed(trained_until_killed, *arguments)
        steps |= read_by(note)

    epochs = [epoch_order(NUM_WINDOWS, 0, epoch).tolist() for epoch in range(5)]
    stream = list(itertools.chain(*epochs))[: STEPS * WINDOWS_PER_STEP]
    expected = [stream[i : i + WINDOWS_PER_STEP] for i in range(0, len(stream), WINDOWS_PER_STEP)]
    assert [steps[step] for step in range(STEPS)] == expected
    run = Path(config(1).run.output_dir) / "tiny"
    records, events = read_metrics(run / "metrics.jsonl")
    assert [record["windows"] for record in records] == expected
    assert [e["step"] for e in events if e["event"] == "start"] == [0, 2, 4]


def test_a_step_of_more_windows_than_there_are_is_pointed_out_once(tiny, caplog):
    for windows, said in ((NUM_WINDOWS, 0), (NUM_WINDOWS + 2, 1)):
        caplog.clear()
        config = tiny(train={"steps": 1, "windows_per_step": windows})
        for rank in range(2):
            build_loader(config, open_dataset(config), Mesh(2, rank, 2, 1))
        assert caplog.text.count(f"holds 8 windows, train.windows_per_step is {windows}") == said
