"""What a run and its resume leave: a trace, traffic as predicted, seconds, one wandb run."""

import json
import re
from pathlib import Path

import pytest

from anchorcontext.testing import run_distributed
from anchorcontext.train import observers
from anchorcontext.train.loop import train
from anchorcontext.watch.jsonl import read_metrics


def trained(rank, world_size, configs):
    return [train(config).step for config in configs]


def watched(tiny, steps):
    return tiny(
        model={"gradient_checkpointing": True},
        parallel={"sp": 2},
        train={"steps": steps, "windows_per_step": 2},
        watch={"profile": {"from": 2, "steps": 1}, "wandb": {"mode": "offline"}},
    )


def test_a_run_and_its_resume_leave_traffic_seconds_a_trace_and_one_wandb_run(tiny):
    configs = [watched(tiny, 2), watched(tiny, 3)]
    assert run_distributed(trained, 2, configs) == [[2, 3], [2, 3]]
    folder = Path(configs[0].run.output_dir) / configs[0].run.name
    records, events = read_metrics(folder / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3]
    for record in records:
        assert record["bytes_predicted"] == record["bytes_sent"] > 0
        parts = ["data", "exchange", "compute", "optimizer", "other"]
        seconds = [record[f"seconds_{part}"] for part in parts]
        assert sum(seconds) == pytest.approx(record["seconds"], rel=1e-9)
        assert min(seconds) >= 0 and record["seconds_compute"] > 0
        assert record["seconds_attention"] <= record["seconds_compute"]

    starts = [event for event in events if event["event"] == "start"]
    assert [start["step"] for start in starts] == [0, 2]
    assert (starts[0]["ranks"], starts[0]["sp"], starts[0]["device"]) == (2, 2, "cpu")
    commit = starts[0]["commit"]
    assert commit is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", commit)
    assert starts[0]["versions"]["torch"]

    (traced,) = [event for event in events if event["event"] == "profile"]
    assert traced["step"] == 2 and Path(traced["path"]).is_file()
    assert len(list((folder / "profile").iterdir())) == 1

    state = json.loads((folder / "wandb.json").read_text())
    parts = sorted((folder / "wandb").glob("offline-run-*"))
    assert state["last_step"] == 3 and len(parts) == 2
    assert all(part.name.endswith(state["id"]) for part in parts)


def trained_on_a_small_device(rank, world_size, config, free):
    observers.free_bytes = lambda device: free if rank == 0 else 10**15
    report = train(config)
    return report.step, report.parity_checks


def test_a_logit_check_that_rank_zero_has_no_room_for_is_left_out_and_said(tiny):
    def run(name, free):
        config = tiny(
            run={"name": name},
            train={"steps": 1, "windows_per_step": 2},
            parity={"at_start": True, "at_end": False},
        )
        found = run_distributed(trained_on_a_small_device, 2, config, free)
        return found, read_metrics(Path(config.run.output_dir) / name / "metrics.jsonl")[1]

    found, events = run("small", 2**20)
    assert found == [(1, 0), (1, 0)]
    (left_out,) = [event for event in events if event["event"] == "parity_left_out"]
    assert re.search(r"before the first step is left out.* 0\.0 GiB free", left_out["text"])
    assert run("large", 2**26)[0] == [(1, 1), (1, 1)], "the model is small"
