"""Console, wandb and TensorBoard: they show the run and never stop it."""

import io
import json
import logging
import sys
from types import SimpleNamespace

import pytest

from anchorcontext.config import parse_config
from anchorcontext.watch import trackers
from anchorcontext.watch.console import ConsoleSink
from anchorcontext.watch.jsonl import read_metrics
from anchorcontext.watch.metrics import LocalStep, make_record
from anchorcontext.watch.sinks import METRICS_FILE, Sinks, build_sinks
from anchorcontext.watch.trackers import TensorBoardSink, WandbSink


def record(step: int, **values):
    share = LocalStep(loss_sum=6.0, loss_tokens=3, tokens=12345, seconds=1.0)
    return make_record([share], **{"step": step, "lr": 2e-5, "grad_norm": 1.5, **values})


def config(**watch):
    return parse_config(
        {
            "run": {"name": "r"},
            "model": {"scratch": {"model_type": "llama", "hf_token": "very-secret-value"}},
            "data": {"path": "data", "window_tokens": 64, "tokenizer": "folder"},
            "train": {"steps": 2, "windows_per_step": 1},
            "watch": {"progress": False, **watch},
        }
    )


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_off_a_terminal_each_record_is_one_line():
    stream = io.StringIO()
    sink = ConsoleSink(total_steps=10, start_step=4, stream=stream)
    sink.log(record(5))
    sink.event("checkpoint", step=5)
    sink.evaluation(5, {"held_out/64": 2.51234, "niah_single/64": 0.5}, 3.21)
    sink.log(record(6, skip_reason="no target"))
    sink.close()
    first, event, evaluated, second = stream.getvalue().splitlines()
    assert evaluated == "evaluation  step 5  held_out/64 2.512  niah_single/64 0.5  (3.2 s)"
    assert first.startswith(
        "step 5/10  loss 2.0000  grad 1.5  lr 2.00e-05  12.3k tokens/s  left 0:"
    )
    assert event == "checkpoint  step 5"
    assert second.startswith("step 6/10  skipped (no target)")


def test_time_left_follows_the_pace(monkeypatch):
    clock = iter([100.0, 102.0, 104.0])
    monkeypatch.setattr("anchorcontext.watch.console.time.monotonic", lambda: next(clock))
    sink = ConsoleSink(total_steps=10, start_step=4, stream=io.StringIO())
    assert sink.seconds_left() is None
    sink.log(record(5))
    sink.log(record(6))
    assert sink.seconds_left() == 8.0


def test_on_a_terminal_a_bar_is_drawn_and_log_messages_pass_above_it():
    stream = Terminal()
    logger = logging.getLogger()
    handler = logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    try:
        sink = ConsoleSink(total_steps=10, stream=stream)
        assert handler not in logger.handlers
        sink.log(record(1))
        sink.close()
        assert handler in logger.handlers
    finally:
        logger.removeHandler(handler)
    assert "step 1/10" in stream.getvalue() and "loss 2.0000" in stream.getvalue()


def test_tensorboard_files_hold_the_numbers_and_hide_superseded_steps(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoardSink(tmp_path)
    for step in (1, 2, 3):
        first.log(record(step))
    first.close()
    second = TensorBoardSink(tmp_path, resume_step=1)
    second.log(record(2, lr=1.0))
    second.event("checkpoint", step=2)
    second.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    rates = events.Scalars("lr")
    assert [point.step for point in rates] == [1, 2]
    assert rates[-1].value == 1.0
    assert "tokens_per_second" in events.Tags()["scalars"]


@pytest.fixture
def no_network(monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    for name in ("HTTPS_PROXY", "https_proxy", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)


def test_wandb_is_offline_without_a_network_and_keeps_its_run_over_a_resume(
    tmp_path, no_network, monkeypatch
):
    monkeypatch.setattr(sys, "argv", ["train", "job.yaml", "data.hub_token=argument-secret"])
    made_by = {"commit": "c0ffee" * 6 + "c0ff", "versions": {"torch": "2.99.7"}}
    watch = config(wandb=True)
    with build_sinks(watch, tmp_path, rank=0, total_steps=9, made_by=made_by) as sinks:
        for step in (1, 2, 3):
            sinks.log(record(step))
        sinks.event("checkpoint", step=3)
    first = json.loads((tmp_path / "wandb.json").read_text())
    assert first["last_step"] == 3

    resumed = WandbSink(tmp_path, name="r", config={})
    logged = []
    send = resumed._run.log
    resumed._run.log = lambda values, step: (logged.append((step, values)), send(values, step=step))
    resumed.evaluation(2, {"held_out/64": 9.0}, 1.0)  # wandb is past step 2 already
    for step in (2, 3, 4):
        resumed.log(record(step))
    resumed.evaluation(4, {"held_out/64": 2.5}, 1.0)
    resumed.close()
    assert json.loads((tmp_path / "wandb.json").read_text()) == {"id": first["id"], "last_step": 4}
    (step, _), evaluated = logged
    assert step == 4 and evaluated == (4, {"evaluation/held_out/64": 2.5})
    folders = list((tmp_path / "wandb").glob("offline-run-*"))
    assert folders and all(folder.name.endswith(first["id"]) for folder in folders)
    written = b"".join(file.read_bytes() for file in (tmp_path / "wandb").rglob("*.wandb"))
    assert b"tokens_per_second" in written and b"very-secret-value" not in written
    assert made_by["commit"].encode() in written and b"2.99.7" in written
    assert b"argument-secret" not in written


def test_wandb_without_a_key_is_offline(monkeypatch, no_network):
    class Connection:
        def close(self):
            pass

    monkeypatch.setattr(trackers.socket, "create_connection", lambda *a, **k: Connection())
    assert trackers._reachable_mode(SimpleNamespace(login=lambda prompt: False)) == "offline"
    assert trackers._reachable_mode(SimpleNamespace(login=lambda prompt: True)) == "online"


def test_wandb_falls_back_to_offline_when_online_fails(tmp_path, monkeypatch):
    import wandb

    modes = []

    def init(mode, **arguments):
        modes.append(mode)
        if mode == "online":
            raise RuntimeError("server down")
        return SimpleNamespace(finish=lambda: None)

    monkeypatch.setattr(wandb, "init", init)
    WandbSink(tmp_path, name="r", config={}, mode="online").close()
    assert modes == ["online", "offline"]


def test_a_missing_wandb_is_reported_once_and_training_goes_on(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    sinks = build_sinks(config(wandb=True), tmp_path, rank=0, total_steps=2)
    sinks.log(record(1))
    sinks.log(record(2))
    sinks.close()
    assert [values["step"] for values in read_metrics(tmp_path / METRICS_FILE)[0]] == [1, 2]
    assert len([message for message in caplog.messages if "failed" in message]) == 1


class Failing:
    def __init__(self):
        self.calls = 0

    def log(self, record):
        self.calls += 1
        raise RuntimeError("no connection")

    event = close = log


def test_a_failing_sink_is_reported_once(caplog):
    optional, required = Failing(), Failing()
    sinks = Sinks([optional], [required])
    for step in (1, 2, 3):
        sinks.log(record(step))
    assert (optional.calls, required.calls) == (1, 3)
    assert len(caplog.messages) == 2
    assert "training goes on without it: RuntimeError: no connection" in caplog.messages[0]


def test_only_rank_0_writes(tmp_path):
    with build_sinks(config(progress=True), tmp_path, rank=1, total_steps=2) as sinks:
        sinks.log(record(1))
        sinks.event("checkpoint", step=1)
    assert list(tmp_path.iterdir()) == []


def test_build_sinks_opens_what_the_config_asks_for(tmp_path, capsys):
    watch = config(progress=True, tensorboard=True)
    with build_sinks(watch, tmp_path, rank=0, total_steps=2) as sinks:
        sinks.log(record(1))
    assert "step 1/2" in capsys.readouterr().err
    assert (tmp_path / "metrics.jsonl").exists()
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))
