"""``anchorcontext submit``: train as a SLURM job."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from anchorcontext.cli.common import Outcome, echo, plain_command
from anchorcontext.words import counted


@plain_command
@click.argument("config_path", metavar="CONFIG", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--nodes", type=click.IntRange(min=1), required=True, help="Machines.")
@click.option("--partition", required=True, help="Partition of the cluster.")
@click.option(
    "--gpus-per-node",
    type=click.IntRange(min=0),
    default=8,
    show_default=True,
    help="Ranks of a machine; 0: one, on its CPUs.",
)
@click.option("--time", "limit", metavar="TIME", help="Limit of the job, as 1-12:00:00.")
@click.option("--account", help="Account that pays.")
@click.option(
    "--container",
    metavar="IMAGE",
    help="Run in it: FILE.sif by apptainer, any other image by srun with pyxis.",
)
@click.option("--dry-run", is_flag=True, help="Show the batch script, submit nothing.")
def command(
    config_path: Path,
    overrides: tuple[str, ...],
    nodes: int,
    partition: str,
    gpus_per_node: int,
    limit: str | None,
    account: str | None,
    container: str | None,
    dry_run: bool,
) -> Outcome:
    """Train as a SLURM job that stops ahead of its time limit and queues itself again.

    Checks the config and that it fits the ranks, shows the batch script (launch/slurm.sbatch,
    filled in) and submits it. The job runs in the working directory, which all nodes must see.
    """
    from anchorcontext.config import load_config
    from anchorcontext.train.slurm import BatchJob, render, submit

    config = load_config(config_path, list(overrides))
    job = BatchJob(
        name=config.run.name,
        nodes=nodes,
        partition=partition,
        gpus_per_node=gpus_per_node,
        time=limit,
        account=account,
        container=container,
        # This installation, unless the container brings its own.
        bin=None if container else str(Path(sys.executable).parent),
    )
    shape = config.check_world(job.world_size)
    script = render(job, [str(config_path), *overrides])
    echo(script)
    report = {"job": None, "ranks": job.world_size, "dp": shape.dp, "sp": shape.sp}
    if dry_run:
        return Outcome({**report, "script": script})
    number = submit(script)
    ranks = f"{counted(job.world_size, 'rank')} = dp {shape.dp} x sp {shape.sp}"
    echo(f"submitted as job {number}: {ranks}")
    echo(f"  log   slurm-{number}.out")
    echo(f"  stop  scancel --signal=USR1 {number} (saves and queues again), scancel {number}")
    return Outcome({**report, "job": number, "script": script})
