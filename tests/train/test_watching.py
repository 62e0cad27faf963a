"""What a run leaves to look at: traces, traffic as predicted, seconds that add up, who made it."""

import re
from pathlib import Path

import pytest

from anchorcontext.testing import run_distributed
from anchorcontext.train.loop import train
from anchorcontext.watch.jsonl import read_metrics


def trained(rank, world_size, config):
    return train(config).step


def test_a_run_leaves_its_traffic_its_seconds_a_trace_and_what_made_it(tiny):
    config = tiny(
        model={"gradient_checkpointing": True},
        parallel={"sp": 2},
        train={"steps": 3, "windows_per_step": 2},
        checkpoint={"final": False},
        watch={"profile": {"from": 2, "steps": 1}},
    )
    assert run_distributed(trained, 2, config) == [3, 3]
    folder = Path(config.run.output_dir) / config.run.name
    records, events = read_metrics(folder / "metrics.jsonl")
    assert len(records) == 3
    for record in records:
        assert record["bytes_predicted"] == record["bytes_sent"] > 0
        parts = ["data", "exchange", "compute", "optimizer", "other"]
        seconds = [record[f"seconds_{part}"] for part in parts]
        assert sum(seconds) == pytest.approx(record["seconds"], rel=1e-9)
        assert min(seconds) >= 0 and record["seconds_compute"] > 0
        assert record["seconds_attention"] <= record["seconds_compute"]
    start = events[0]
    assert (start["event"], start["ranks"], start["sp"], start["device"]) == ("start", 2, 2, "cpu")
    assert start["versions"]["torch"]
    assert start["commit"] is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", start["commit"])
    (traced,) = [event for event in events if event["event"] == "profile"]
    assert traced["step"] == 2 and Path(traced["path"]).is_file()
    assert len(list((folder / "profile").iterdir())) == 1
