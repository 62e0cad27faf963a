"""The metrics file survives kills, resumes and full disks with one step axis."""

import json
import math
import os

import numpy as np
import pytest

from anchorcontext.watch.jsonl import JsonlSink, read_metrics
from anchorcontext.watch.metrics import LocalStep, make_record


def record(step: int, loss: float = 1.0):
    share = LocalStep(loss_sum=loss, loss_tokens=1, tokens=1, seconds=1.0)
    return make_record([share], step=step, lr=0.1, grad_norm=1.0, windows=[step])


def write(path, steps, resume_step=0, loss=1.0):
    sink = JsonlSink(path, resume_step)
    for step in steps:
        sink.log(record(step, loss))
    sink.close()


def steps_of(path):
    return [values["step"] for values in read_metrics(path)[0]]


def test_one_line_a_step_with_the_documented_fields(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    write(path, [1, 2])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["loss"] == 1.0 and lines[0]["windows"] == [1]


def test_records_beyond_the_resumed_step_are_superseded(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 8), loss=1.0)
    write(path, range(5, 10), resume_step=4, loss=2.0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 10))
    assert [line["loss"] for line in lines] == [1.0] * 4 + [2.0] * 5


def test_a_run_killed_before_its_first_checkpoint_starts_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2, 3])
    write(path, [1, 2])
    assert steps_of(path) == [1, 2]


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_torn_last_line_is_dropped(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2, 3])
    os.truncate(path, path.stat().st_size - cut)
    assert steps_of(path) == [1, 2]
    write(path, [3, 4], resume_step=3)
    assert steps_of(path) == [1, 2, 3, 4]


def test_zeros_and_broken_bytes_after_a_crash_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1])
    with open(path, "ab") as file:
        file.write(b"\xff\xfe{\n" + b"\0" * 32)
    write(path, [2], resume_step=1)
    assert steps_of(path) == [1, 2]
    assert len(path.read_text().splitlines()) == 2


def test_events_stay_over_resumes(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.log(record(1))
    sink.event("checkpoint", step=1, path=tmp_path)
    sink.log(record(2))
    sink.event("parity", step=2, largest=np.float64(0.5), where=math.nan)
    sink.close()
    JsonlSink(path, 1).close()
    records, events = read_metrics(path)
    assert [values["step"] for values in records] == [1]
    assert [values["event"] for values in events] == ["checkpoint", "parity"]
    assert events[0]["path"] == str(tmp_path)
    assert events[1]["largest"] == 0.5 and events[1]["where"] is None


def test_the_first_event_after_a_resume_counts_the_steps_whose_work_was_lost(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 8))
    sink = JsonlSink(path, 4)
    sink.event("start")
    sink.event("checkpoint")
    sink.close()
    first, second = read_metrics(path)[1]
    assert first["superseded"] == 3 and "superseded" not in second


def test_the_first_event_after_a_resume_says_how_long_nothing_was_written(tmp_path, monkeypatch):
    clock = iter([100.0, 107.5, 150.25, 151.0])
    monkeypatch.setattr("time.time", lambda: next(clock))
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.event("start")
    sink.log(record(1))
    sink.close()
    resumed = JsonlSink(path)  # from the beginning: the record is dropped, its time counts
    resumed.event("start")
    resumed.event("checkpoint")
    resumed.close()
    records, (first, second, third) = read_metrics(path)
    assert not records and second["seconds_down"] == 42.75
    assert "seconds_down" not in first and "seconds_down" not in third


def test_an_event_never_shows_a_secret(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.event("start", config={"hf_token": "abc"})
    sink.close()
    assert "abc" not in (tmp_path / "metrics.jsonl").read_text()


def test_a_step_that_does_not_follow_is_refused(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log(record(3))
    with pytest.raises(ValueError, match="step 3 was logged after step 3"):
        sink.log(record(3))
    sink.close()


def test_every_line_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log(record(1))
    assert steps_of(tmp_path / "metrics.jsonl") == [1]
    sink.close()


def test_after_a_failed_write_the_next_record_is_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.log(record(1))
    whole = sink._file

    class HalfWritten:
        def write(self, text):
            whole.write(text[:10])
            whole.flush()
            raise OSError("No space left on device")

    sink._file = HalfWritten()
    with pytest.raises(OSError):
        sink.log(record(2))
    sink._file = whole
    sink.log(record(3))
    sink.close()
    assert steps_of(path) == [1, 3]
