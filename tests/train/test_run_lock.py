"""One job at a time in a run folder, whichever way the one before ended."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from anchorcontext.errors import UserError
from anchorcontext.testing import run_distributed
from anchorcontext.train import run_lock
from anchorcontext.train.loop import train
from anchorcontext.train.run_lock import RunLock

HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "a+")
fcntl.lockf(file, fcntl.LOCK_EX)
file.write("process 17 on node-4")
file.flush()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder():
    """Another job's process that holds the lock of a run folder."""
    started = []

    def hold(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-c", HOLDER, str(run_dir / run_lock.FILE)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout.readline() == b"held\n"
        return process

    yield hold
    for process in started:
        process.kill()
        process.communicate()


def test_a_second_job_is_refused_and_a_killed_one_leaves_no_lock(tmp_path, monkeypatch, holder):
    monkeypatch.setattr(run_lock, "WAIT_SECONDS", 0.0)
    process = holder(tmp_path / "run")
    with pytest.raises(UserError, match=r"process 17 on node-4 is training in this folder; .*name"):
        RunLock(tmp_path / "run")
    process.kill()
    process.wait()
    RunLock(tmp_path / "run").close()
    assert "process 17" not in (tmp_path / "run" / run_lock.FILE).read_text()


def test_a_start_waits_for_the_ranks_of_the_one_before(tmp_path, monkeypatch, holder):
    monkeypatch.setattr(run_lock, "RETRY_SECONDS", 0.01)
    process = holder(tmp_path)
    threading.Timer(0.3, process.kill).start()
    started = time.monotonic()
    RunLock(tmp_path).close()
    assert time.monotonic() - started < 20


def refused(rank, world_size, config):
    run_lock.WAIT_SECONDS = 0.0
    try:
        train(config)
    except UserError as error:
        return str(error)
    return None


def test_every_rank_of_a_second_job_hears_of_the_first_before_it_builds_a_model(tiny, holder):
    config = tiny(parallel={"sp": 2})
    run_dir = Path(config.run.output_dir) / config.run.name
    holder(run_dir)
    messages = run_distributed(refused, 2, config)
    assert all("process 17 on node-4 is training" in message for message in messages)
    assert [path.name for path in run_dir.iterdir()] == [run_lock.FILE]
