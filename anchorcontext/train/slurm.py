"""The batch script of a SLURM job: ``launch/slurm.sbatch`` with one job's options filled in.

The template is complete as it stands and is packaged as ``scripts/slurm.sbatch``. Rendering sets
its ``#SBATCH`` lines, writes the arguments of ``train`` into it, and puts ``launch/env.sh`` in the
place where that is sourced, so that the script needs nothing beside it.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from ..errors import UserError

ARGUMENTS = re.compile(r'^set -- "\$@".*$', re.MULTILINE)
ENVIRONMENT = re.compile(r'^# shellcheck source=launch/env\.sh\n\. "\$SLURM_SUBMIT_DIR.*$', re.M)
DIRECTIVE = "#SBATCH --"
NO_WORD = r"""[\s"'#\\]"""


@dataclass(frozen=True)
class BatchJob:
    """What a job asks SLURM for; None leaves an option to the template or the cluster."""

    name: str
    nodes: int
    partition: str
    gpus_per_node: int
    """One rank each; 0 runs one rank a node on its CPUs."""
    time: str | None = None
    """In SLURM's form, as ``1-12:00:00``."""
    account: str | None = None
    container: str | None = None
    bin: str | None = None
    """Folder of ``torchrun`` on the nodes; None takes the one on PATH, as in a container."""

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.nodes * max(self.gpus_per_node, 1)

    def options(self) -> dict[str, str]:
        """sbatch's long options."""
        asked = {
            # SLURM's parser takes quotes and comments out of a word.
            "job-name": re.sub(rf"{NO_WORD}+", "-", self.name),
            "nodes": str(self.nodes),
            "partition": self.partition,
            "gpus-per-node": str(self.gpus_per_node) if self.gpus_per_node else None,
            "time": self.time,
            "account": self.account,
        }
        return {name: value for name, value in asked.items() if value is not None}


def render(job: BatchJob, arguments: Sequence[str]) -> str:
    """The batch script that trains with ``arguments``: CONFIG and KEY=VALUE.

    Raises:
        UserError: an option is no word that a ``#SBATCH`` line can carry.
    """
    text = _with_options(_script("slurm.sbatch"), job.options())
    chosen = {"RANKS": str(max(job.gpus_per_node, 1)), "CONTAINER": job.container, "BIN": job.bin}
    lines = [f"{name}={shlex.quote(value)}" for name, value in chosen.items() if value]
    lines.append(f"set -- {shlex.join(arguments)}")
    text, written = ARGUMENTS.subn(lambda _: "\n".join(lines), text)
    environment = _script("env.sh").split("\n", 1)[1].rstrip()
    text, sourced = ENVIRONMENT.subn(lambda _: environment, text)
    assert written == sourced == 1, "launch/slurm.sbatch has lost a line that is filled in"
    return text


def submit(script: str) -> str:
    """Hand the batch script to SLURM; the job's id.

    Raises:
        UserError: there is no sbatch here, or it refuses the job; with its reason.
    """
    if shutil.which("sbatch") is None:
        raise UserError(
            "sbatch is not on PATH: submit from a login node of the cluster, or take the script "
            "there with --dry-run"
        )
    done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"sbatch refused the job: {done.stderr.strip()}")
    return done.stdout.strip().split(";")[0]


def _with_options(text: str, options: dict[str, str]) -> str:
    """The script with each option's line replaced, or added to the others."""
    head, *lines = text.split("\n")
    end = max(index for index, line in enumerate(lines) if line.startswith(DIRECTIVE)) + 1
    directives = {line.removeprefix(DIRECTIVE).split("=")[0]: line for line in lines[:end]}
    for name, value in options.items():
        if not value or re.search(NO_WORD, value):
            raise UserError(f"--{name} {value!r}: must be one word without spaces, quotes and #")
        directives[name] = f"{DIRECTIVE}{name}={value}"
    return "\n".join([head, *directives.values(), *lines[end:]])


def _script(name: str) -> str:
    return (files(__package__) / "scripts" / name).read_text(encoding="utf-8")
