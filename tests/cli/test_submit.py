"""``anchorcontext submit``: the batch script it renders, and how it hands it over."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from anchorcontext.cli import group
from anchorcontext.errors import UserError
from anchorcontext.train.slurm import BatchJob, render

ROOT = Path(__file__).parents[2]
CONFIG = "configs/llama3_8b_64k_anchor.yaml"
ON_TWO_NODES = ("--nodes", "2", "--partition", "gpu")


def rendered(arguments=(CONFIG,), **options):
    job = {"name": "run", "nodes": 2, "partition": "gpu", "gpus_per_node": 8}
    return render(BatchJob(**{**job, **options}), arguments)


def directives(script):
    return dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", script, re.MULTILINE))


def test_options_become_directives_and_the_template_s_own_stay():
    found = directives(rendered(time="1-12:00:00", account="lab"))
    asked = {"nodes": "2", "partition": "gpu", "gpus-per-node": "8", "time": "1-12:00:00"}
    assert asked.items() <= found.items()
    assert found["account"] == "lab" and found["job-name"] == "run"
    assert found["ntasks-per-node"] == "1" and found["signal"] == "USR1@300"
    assert "requeue" in found
    assert "gpus-per-node" not in directives(rendered(gpus_per_node=0))


def test_every_directive_stands_before_the_first_command():
    lines = rendered(time="10").splitlines()
    last = max(index for index, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(line.startswith("#") for line in lines[:last])


@pytest.mark.parametrize("account", ["a b", 'a"b', "a#b", ""])
def test_an_option_that_a_directive_cannot_carry_is_refused(account):
    with pytest.raises(UserError, match=f"--account {account!r}"):
        rendered(account=account)


def test_any_name_of_a_run_gives_a_job_a_name():
    script = rendered(name='my run #2 "x" it\'s')
    assert directives(script)["job-name"] == "my-run-2-x-it-s"


# What srun and scontrol are asked to do, and what `train` reports.
FAKES = {
    "srun": '#!/bin/bash\nprintf "%s\\n" "$@" > "$FAKES/srun.args"\n'
    'env > "$FAKES/srun.env"\nprintf "%s" "$REPORT" > "slurm-7.json"\nexit "$STATUS"\n',
    "scontrol": '#!/bin/bash\necho "$@" > "$FAKES/scontrol.args"\n',
}


def run_script(folder, script, report, status="0", **variables):
    """The script, its srun replaced: exit status, arguments of srun, whether it requeued."""
    for name, text in FAKES.items():
        path = folder / name
        path.write_text(text)
        path.chmod(0o755)
    (folder / "scontrol.args").unlink(missing_ok=True)
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "FAKES": str(folder),
        "REPORT": json.dumps(report),
        "STATUS": status,
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
        **variables,
    }
    done = subprocess.run(["bash", "-c", script], env=environment, cwd=folder, timeout=20)
    arguments = (folder / "srun.args").read_text().splitlines()
    return done.returncode, arguments, (folder / "scontrol.args").exists()


STOPPED = {"stopped_by": "SIGUSR1", "tokens": 96}


@pytest.mark.parametrize(
    ("report", "status", "requeues"),
    [
        (STOPPED, "0", True),
        ({"stopped_by": None, "tokens": 96}, "0", False),
        ({"stopped_by": "SIGTERM", "tokens": 96}, "0", False),
        ({"stopped_by": "SIGUSR1", "tokens": 0, "seconds": 1}, "0", False),
        (STOPPED, "1", False),
    ],
    ids=["stopped", "done", "cancelled", "without a step", "failed"],
)
def test_a_job_queues_itself_again_only_when_it_was_stopped(tmp_path, report, status, requeues):
    script = rendered(gpus_per_node=0, bin="/opt/env/bin")
    assert run_script(tmp_path, script, report, status)[::2] == (int(status), requeues)


def test_arguments_reach_train_word_by_word(tmp_path):
    overrides = ["data.sources=[{path: a b}]", "run.name=it's"]
    script = rendered([CONFIG, *overrides], bin="/opt/env/bin")
    _, arguments, _ = run_script(tmp_path, script, STOPPED)
    train = arguments.index("train")
    assert arguments[train - 2 : train] == ["-m", "anchorcontext"]
    assert arguments[train + 1 :] == [CONFIG, *overrides, "--json", "slurm-7.json"]
    assert "/opt/env/bin/torchrun" in arguments
    assert arguments[arguments.index("--nproc-per-node") + 1] == "8"
    assert arguments[arguments.index("--nnodes") + 1] == "2"
    assert "PYTHONSAFEPATH=1" in (tmp_path / "srun.env").read_text().splitlines()


def test_a_container_wraps_torchrun(tmp_path):
    _, arguments, _ = run_script(tmp_path, rendered(container="a/b.sif"), STOPPED)
    start = arguments.index("apptainer")
    assert arguments[start : start + 3] == ["apptainer", "exec", "--nv"]
    assert arguments[start + 7 : start + 9] == ["a/b.sif", "torchrun"]
    _, arguments, _ = run_script(tmp_path, rendered(container="reg#org/image:1"), STOPPED)
    assert "--container-image=reg#org/image:1" in arguments and "apptainer" not in arguments


def test_the_checkout_s_script_takes_arguments_and_environment_by_itself(tmp_path):
    template = (ROOT / "launch" / "slurm.sbatch").read_text()
    variables = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_GPUS_ON_NODE": "4", "MASTER": "n1"}
    script = f"set -- c.yaml a=1\n{template}"
    _, arguments, requeued = run_script(tmp_path, script, STOPPED, **variables)
    assert arguments[arguments.index("train") + 1 :][:2] == ["c.yaml", "a=1"]
    assert arguments[arguments.index("--nproc-per-node") + 1] == "4"
    assert arguments[arguments.index("--rdzv-endpoint") + 1] == "n1:20007"
    assert requeued


def test_a_world_that_does_not_fit_is_refused_before_the_queue():
    found = CliRunner().invoke(group, ["submit", CONFIG, "parallel.sp=3", *ON_TWO_NODES])
    assert found.exit_code == 2 and "parallel.sp" in found.output and "#SBATCH" not in found.output


def test_a_dry_run_shows_the_script_and_submits_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    shown = CliRunner().invoke(group, ["submit", CONFIG, *ON_TWO_NODES, "--dry-run"])
    assert shown.exit_code == 0 and "#SBATCH --nodes=2" in shown.output
    refused = CliRunner().invoke(group, ["submit", CONFIG, *ON_TWO_NODES])
    assert refused.exit_code == 2 and "sbatch is not on PATH" in refused.output


def test_sbatch_gets_the_script_and_gives_the_number(tmp_path, monkeypatch):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f'#!/bin/bash\ncat > {tmp_path}/script\necho "41;cluster"\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = CliRunner().invoke(group, ["submit", CONFIG, *ON_TWO_NODES, "run.seed=5"])
    assert found.exit_code == 0 and "submitted as job 41: 16 ranks" in found.output
    assert f"set -- {CONFIG} run.seed=5" in (tmp_path / "script").read_text()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_scripts_are_clean_for_shellcheck(tmp_path):
    (tmp_path / "rendered.sh").write_text(rendered(container="image", bin="/opt/env/bin"))
    scripts = [*(ROOT / "launch").glob("*.sh"), ROOT / "launch" / "slurm.sbatch"]
    command = ["shellcheck", "--external-sources", *scripts, tmp_path / "rendered.sh"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
