"""A real two-node SLURM on this machine: the batch script stopped by a signal goes on by itself.

``make test-slurm`` installs what it needs. munged, slurmctld and two slurmd run on loopback, in a
folder of their own; nothing of the system's own SLURM or munge is touched.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from anchorcontext.config import save_config
from anchorcontext.testing import run_distributed
from anchorcontext.testing.distributed import free_port
from anchorcontext.train.consolidate import load_consolidated_state_dict
from anchorcontext.train.loop import train
from anchorcontext.watch.jsonl import read_metrics

STEPS = 100
PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol")
SEARCHED = f"{os.environ['PATH']}:/usr/sbin"
MISSING = [name for name in PROGRAMS if shutil.which(name, path=SEARCHED) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="SLURM's daemons are started as root"),
    pytest.mark.skipif(
        bool(MISSING), reason="no SLURM: `make test-slurm` installs slurm-wlm, munge"
    ),
]

# cred_expire: a requeued job waits until the credentials of its last run have expired (120 s).
CONF = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
KillWait=60
ReturnToService=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port_1} CPUs=1 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port_2} CPUs=1 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """The daemons, and SLURM's commands as a user of the cluster calls them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "PATH": f"{os.environ['PATH']}:/usr/sbin",
            "SLURM_CONF": str(folder / "slurm.conf"),
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONSAFEPATH": "1",
        }
        self.daemons: list[subprocess.Popen] = []

    def start(self) -> None:
        folder = self.folder
        folder.chmod(0o755)
        (folder / "state").mkdir()
        host = self.run("hostname", "-s")
        ports = {name: free_port() for name in ("ctld_port", "port_1", "port_2")}
        (folder / "slurm.conf").write_text(CONF.format(folder=folder, host=host, **ports))
        self.run("mungekey", "--create", f"--keyfile={folder}/munge.key")
        own = [f"--{name}={folder}/munge.{name.split('-')[0]}" for name in MUNGE_FILES]
        self._daemon("munged", "--foreground", "--force", "--num-threads=2", *own)
        self._wait(lambda: (folder / "munge.socket").exists(), 20)
        self._daemon("slurmctld", "-D", "-i")
        for node in ("n1", "n2"):
            self._daemon("slurmd", "-D", "-N", node)
        self._wait(lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D", check=False) == "2")

    def stop(self) -> None:
        self.run("scancel", "--user=root", "--signal=KILL", check=False)
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in self.daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()

    def run(self, *command: str, check: bool = True, cwd: Path | None = None) -> str:
        done = subprocess.run(
            command, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=60
        )
        assert not check or done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def job(self, number: str, field: str) -> str:
        """A field of ``scontrol show job``."""
        shown = dict(
            pair.split("=", 1)
            for pair in self.run("scontrol", "--oneliner", "show", "job", number).split()
            if "=" in pair
        )
        return shown[field]

    def wait_for(self, number: str, what, seconds: float = 300.0) -> None:
        """Until ``what()``; at once an error when the job ends in another way."""
        self._wait(lambda: what() or self._failed(number), seconds)
        assert what(), self.log(number)

    def log(self, number: str) -> str:
        path = self.folder / f"slurm-{number}.out"
        return path.read_text() if path.exists() else f"no {path}"

    def _failed(self, number: str) -> bool:
        return self.job(number, "JobState") in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

    def _daemon(self, *command: str) -> None:
        name = "-".join(word for word in command if not word.startswith("-"))
        with (self.folder / f"{name}.log").open("w") as log:
            self.daemons.append(
                subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
            )

    def _wait(self, what, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            logs = {path.name: path.read_text()[-2000:] for path in self.folder.glob("*.log")}
            assert time.monotonic() < deadline, logs
            time.sleep(0.2)


MUNGE_FILES = ("key-file", "log-file", "pid-file", "seed-file", "socket")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    found = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        found.start()
        yield found
    finally:
        found.stop()


def undisturbed(rank, world_size, config):
    return train(config).step


def run_dir(config):
    return Path(config.run.output_dir) / config.run.name


def start(cluster, config, folder):
    """Submit training over both nodes and wait for its first steps; the job's number."""
    save_config(config, folder / f"{config.run.name}.yaml")
    shown = cluster.run(
        *(sys.executable, "-m", "anchorcontext", "submit", f"{folder}/{config.run.name}.yaml"),
        *("--nodes", "2", "--partition", "all", "--gpus-per-node", "0", "--time", "10"),
        cwd=cluster.folder,
    )
    number = shown.split("submitted as job ")[1].split(":")[0]
    metrics = run_dir(config) / "metrics.jsonl"
    cluster.wait_for(number, lambda: metrics.exists() and metrics.read_text().count("\n") > 4)
    return number


def test_a_job_stopped_by_its_signal_queues_itself_and_ends_with_the_same_weights(
    cluster, tiny, tmp_path
):
    def config(name):
        return tiny(run={"name": name}, parallel={"sp": 2}, train={"steps": STEPS})

    reference, submitted = config("reference"), config("submitted")
    run_distributed(undisturbed, 2, reference, timeout=200)
    number = start(cluster, submitted, tmp_path)
    assert cluster.job(number, "NodeList") == "n[1-2]"
    cluster.run("scancel", "--signal=USR1", number)
    cluster.wait_for(number, lambda: cluster.job(number, "JobState") == "COMPLETED")

    assert cluster.job(number, "Restarts") == "1", cluster.log(number)
    records, events = read_metrics(run_dir(submitted) / "metrics.jsonl")
    (stop,) = [event for event in events if event["event"] == "stop"]
    assert stop["reason"] == "SIGUSR1" and 0 < stop["step"] < STEPS
    assert f"resumed from {run_dir(submitted)}" in cluster.log(number)
    expected, _ = read_metrics(run_dir(reference) / "metrics.jsonl")
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    assert [r["loss"] for r in records] == [r["loss"] for r in expected]
    ends = [
        load_consolidated_state_dict(run_dir(c) / "checkpoints" / f"step-{STEPS:06d}")
        for c in (submitted, reference)
    ]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_cancelled_job_saves_and_does_not_come_back(cluster, tiny, tmp_path):
    config = tiny(run={"name": "cancelled"}, parallel={"sp": 2}, train={"steps": STEPS})
    number = start(cluster, config, tmp_path)
    cluster.run("scancel", number)
    cluster.wait_for(number, lambda: cluster.job(number, "JobState") == "CANCELLED")
    assert cluster.job(number, "Restarts") == "0"
    _, events = read_metrics(run_dir(config) / "metrics.jsonl")
    assert [event["event"] for event in events] == ["start", "checkpoint", "stop"]
    assert events[-1]["reason"] == "SIGTERM"


def test_a_killed_rank_comes_back_within_the_job(cluster, tiny, tmp_path):
    reference, config = (
        tiny(
            run={"name": name},
            parallel={"sp": 2},
            train={"steps": STEPS // 2},
            checkpoint={"every": 2},
        )
        for name in ("undisturbed", "killed")
    )
    run_distributed(undisturbed, 2, reference, timeout=200)
    number = start(cluster, config, tmp_path)
    config_file = str(tmp_path / "killed.yaml")
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if config_file in process.cmdline() and process.environ().get("RANK") == "1":
                process.kill()
    cluster.wait_for(number, lambda: cluster.job(number, "JobState") == "COMPLETED")
    assert cluster.job(number, "Restarts") == "0"
    records, events = read_metrics(run_dir(config) / "metrics.jsonl")
    assert [event["event"] for event in events].count("start") == 2
    expected, _ = read_metrics(run_dir(reference) / "metrics.jsonl")
    assert [r["loss"] for r in records] == [r["loss"] for r in expected]
