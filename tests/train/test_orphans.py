"""A launcher that is killed takes its ranks along."""

import os
import time

import pytest

from anchorcontext.testing import run_distributed
from anchorcontext.train import orphans
from anchorcontext.train.orphans import REASON, stopping_without_launcher
from anchorcontext.train.signals import StopSignals


def orphaned(rank, world_size, found, environ, seconds):
    """A rank whose parent ends; what asked it to stop within ``seconds`` goes to ``found``."""
    orphans.POLL_SECONDS = 0.05
    launcher = os.fork()
    if launcher == 0:
        ready, entered = os.pipe()
        if os.fork() == 0:
            with StopSignals() as stop, stopping_without_launcher(stop, environ=environ):
                os.write(entered, b".")
                deadline = time.monotonic() + seconds
                while stop.name is None and time.monotonic() < deadline:
                    time.sleep(0.01)
            found.with_suffix(".part").write_text(str(stop.name))
            found.with_suffix(".part").rename(found)
            os._exit(0)
        os.read(ready, 1)
        os._exit(0)  # as SIGKILL: without a word to its child
    os.waitpid(launcher, 0)
    deadline = time.monotonic() + 30
    while not found.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return found.read_text()


@pytest.mark.parametrize(
    ("environ", "seconds", "asked"),
    [
        ({"TORCHELASTIC_RUN_ID": "none"}, 20.0, REASON),
        ({"CROSS_RANK": "0"}, 20.0, REASON),
        ({"RANK": "0"}, 0.5, "None"),  # started by hand: a shell that somebody left
    ],
)
def test_only_a_rank_whose_launcher_ended_is_asked_to_stop(tmp_path, environ, seconds, asked):
    assert run_distributed(orphaned, 1, tmp_path / "found", environ, seconds) == [asked]


def test_a_launcher_that_ended_during_the_imports_is_noticed_too(monkeypatch):
    monkeypatch.setattr(orphans, "POLL_SECONDS", 0.01)
    gone, environ = os.getpid(), {"CROSS_RANK": "0"}  # not this process's parent
    with StopSignals() as stop, stopping_without_launcher(stop, gone, environ):
        deadline = time.monotonic() + 10
        while stop.name is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert stop.name == REASON
