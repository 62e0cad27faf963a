"""``anchorcontext parity``: the distributed run against a single device."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import click

from anchorcontext.cli.common import Outcome, config_command, echo, echo_table, is_main_rank
from anchorcontext.config import Config
from anchorcontext.words import counted

if TYPE_CHECKING:
    from anchorcontext.parity.report import ParityReport

PAST_TOLERANCE_STATUS = 1
SHOWN_FAILURES = 5


@config_command
@click.option(
    "--windows",
    type=click.IntRange(min=1),
    metavar="N",
    help="Windows of the step that is compared; default: train.windows_per_step, but at most two "
    "micro-batches a rank.",
)
@click.option(
    "--worst",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    metavar="N",
    help="Parameters shown for each baseline, those nearest to their limit first.",
)
def command(config: Config, windows: int | None, worst: int) -> Outcome:
    """Compare the distributed run with a single device; exits 1 past tolerance.

    Runs one training step without its update on the configured ranks, model and prepared windows,
    and the same windows on rank 0 alone: through stock transformers with an explicit mask (their
    first parity.stock_tokens tokens) and through our own code at full length. Compares logits, loss
    and the gradient of every parameter; a bf16 run is held to the error that one device has against
    fp32. Run it under the launcher that will run train.
    """
    logging.basicConfig(
        level=logging.INFO if is_main_rank() else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
    )
    from anchorcontext.parity.check import check_parity
    from anchorcontext.train.job import Job

    job = Job(one_step(config, windows))
    report = check_parity(
        job.engine, job.next_micro_batches(), job.mesh, job.control, job.config, cost=job.cost
    )
    print_report(report, worst)
    job.close()
    return Outcome(report.to_dict(), exit_code=0 if report.passed else PAST_TOLERANCE_STATUS)


def one_step(config: Config, windows: int | None) -> Config:
    """The config of the step to compare: ``windows`` windows, by default few enough to wait for.

    Raises:
        UserError: the windows do not divide over the ranks.
    """
    from anchorcontext.train.launch import read_launch_environment

    shape = config.check_world(read_launch_environment(os.environ).world_size)
    at_a_time = shape.dp * config.train.micro_batch_windows
    # Two micro-batches show whether accumulation is scaled right; more would show the same again.
    count = windows or at_a_time * min(shape.accumulation, 2)
    train = config.train.model_copy(update={"windows_per_step": count})
    return config.model_copy(update={"train": train})


def print_report(report: ParityReport, worst: int) -> None:
    """The table, and the verdict in one line."""
    from anchorcontext.parity.report import HEADERS

    echo_table(report.rows(worst), HEADERS, title=report.title)
    for part in report.comparisons:
        failed = [check.quantity for check in part.checks if not check.passed]
        failed += [row.difference.name for row in part.worst_gradients() if not row.passed]
        verdict = "within tolerance"
        if failed:
            more = (
                f" and {len(failed) - SHOWN_FAILURES} more" if len(failed) > SHOWN_FAILURES else ""
            )
            verdict = f"FAILED: {', '.join(failed[:SHOWN_FAILURES])}{more}"
        echo(
            f"{part.baseline}: {counted(part.num_windows, 'window')}, "
            f"{counted(part.num_tokens, 'token')}, {counted(len(part.gradients), 'gradient')}: "
            f"{verdict}"
        )
