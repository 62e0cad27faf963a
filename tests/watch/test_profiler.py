"""Profiler windows: only their steps, only their ranks, never in the way of training."""

import gzip
import json
from types import SimpleNamespace

import pytest
import torch

from anchorcontext.config import parse_config
from anchorcontext.errors import UserError
from anchorcontext.watch.profiler import StepProfiler


def section(**profile):
    values = {
        "run": {"name": "r"},
        "model": {"path": "model"},
        "data": {"path": "data", "window_tokens": 64},
        "train": {"steps": 19, "windows_per_step": 1},
        "watch": {"profile": profile},
    }
    return parse_config(values).watch.profile


def train(profiler, steps):
    for step in steps:
        with profiler.step(step):
            torch.ones(4).add(step)
    profiler.close()


def recorded_steps(path):
    with gzip.open(path, "rt") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert "aten::add" in names
    return sorted({name for name in names if name.startswith("step ")})


def test_the_window_is_one_chrome_trace(tmp_path):
    written = []
    profiler = StepProfiler(
        section(**{"from": 3, "steps": 2}), tmp_path, rank=0, written=lambda *a: written.append(a)
    )
    for step in range(1, 7):
        with profiler.step(step):
            torch.ones(4).add(step)
        assert len(written) == (step >= 4)
    path = tmp_path / "profile" / "steps-000003-000004-rank-00000.json.gz"
    assert recorded_steps(path) == ["step 3", "step 4"]
    assert written == [(4, path)]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_run_that_stops_inside_the_window_leaves_what_it_has_and_a_resume_the_rest(tmp_path):
    asked = section(**{"from": 2, "steps": 3})
    train(StepProfiler(asked, tmp_path, rank=0), [1, 2])
    train(StepProfiler(asked, tmp_path, rank=0), [3, 4, 5])
    names = sorted(file.name for file in (tmp_path / "profile").iterdir())
    assert names == [
        "steps-000002-000002-rank-00000.json.gz",
        "steps-000003-000004-rank-00000.json.gz",
    ]


@pytest.mark.parametrize(("ranks", "traces"), [("first", 0), ("all", 1)])
def test_other_ranks_profile_only_when_all_do(tmp_path, ranks, traces):
    asked = section(**{"from": 1, "steps": 1, "ranks": ranks})
    train(StepProfiler(asked, tmp_path, rank=1), [1, 2])
    assert len(list(tmp_path.rglob("*-rank-00001.json.gz"))) == traces


def test_outside_the_window_there_is_no_profiler(tmp_path, monkeypatch):
    def never(*arguments, **options):
        raise AssertionError("the profiler was touched")

    monkeypatch.setattr(torch.profiler, "profile", never)
    monkeypatch.setattr(torch.profiler, "record_function", never)
    train(StepProfiler(section(**{"from": 5, "steps": 2}), tmp_path, rank=0), [1, 2, 7, 8])
    train(StepProfiler(None, tmp_path, rank=0), [1])
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "profile").write_text("in the way")
    train(StepProfiler(section(**{"from": 1, "steps": 1}), tmp_path, rank=0), [1, 2])
    assert "no trace was written" in caplog.text


def test_a_profiler_that_does_not_start_is_a_warning(tmp_path, monkeypatch, caplog):
    def start():
        raise RuntimeError("another profiler runs")

    monkeypatch.setattr(torch.profiler, "profile", lambda **_: SimpleNamespace(start=start))
    train(StepProfiler(section(**{"from": 1, "steps": 3}), tmp_path, rank=0), [1, 2, 3])
    assert caplog.text.count("does not start") == 1


def test_the_config_takes_from_and_says_what_it_means():
    assert section(**{"from": 10}).model_dump() == {"from": 10, "steps": 3, "ranks": "first"}
    with pytest.raises(UserError, match=r"watch\.profile\.from = 0: must be at least 1"):
        section(**{"from": 0})
    with pytest.raises(UserError, match=r"unknown key; .*takes from, steps, ranks"):
        section(first=3)
