"""``anchorcontext train``: the training loop on every rank of the launcher."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import click

from anchorcontext.cli.common import Outcome, config_command, echo_table, is_main_rank
from anchorcontext.config import Config
from anchorcontext.words import counted

if TYPE_CHECKING:
    from anchorcontext.train.dry_run import DryRun
    from anchorcontext.train.report import TrainReport

LAUNCHER = os.getppid()
"""Read before the imports of ``command``: it may be killed while they take a minute."""


@config_command
@click.option("--dry-run", is_flag=True, help="Validate everything, plan one window, stop.")
def command(config: Config, dry_run: bool) -> Outcome:
    """Train; resumes by itself from the run folder. Run it under torchrun, deepspeed or srun."""
    logging.basicConfig(
        level=logging.INFO if is_main_rank() else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
    )
    if dry_run:
        from anchorcontext.train.dry_run import dry_run as validate

        plan = validate(config)
        _print_dry_run(plan)
        return Outcome(plan)
    from anchorcontext.estimate.resources import check_resources
    from anchorcontext.train.loop import train

    report = train(config, check_resources, LAUNCHER)
    _print_report(report)
    return Outcome(report)


def _print_dry_run(found: DryRun) -> None:
    micro_batches = counted(found.accumulation, "micro-batch", "micro-batches")
    echo_table(
        [
            ("ranks", f"{found.world_size} = dp {found.dp} x sp {found.sp}"),
            ("starts at step", f"{found.resumes_at} of {found.steps}"),
            ("accumulation", f"{micro_batches} a step"),
            ("model", f"{found.model_type}, {counted(found.num_layers, 'layer')}"),
            ("windows", f"{found.windows:,}"),
            ("first window", f"{found.window_id}: {found.window_tokens:,} tokens"),
            ("documents", f"{found.window_documents:,}, anchor included"),
            ("targets", f"{found.window_targets:,}"),
            ("layout", f"{found.layout}, {found.tokens_per_rank:,} tokens a rank"),
            ("exchange", found.exchange),
            ("pairs a rank", ", ".join(f"{pairs:,.0f}" for pairs in found.pairs_per_rank)),
            ("bytes sent a rank", ", ".join(f"{sent:,}" for sent in found.bytes_per_rank)),
        ],
        title="Dry run: everything fits; nothing was trained",
    )


def _print_report(report: TrainReport) -> None:
    gib = 2**30
    difference = report.largest_logit_difference
    checks = counted(report.parity_checks, "check")
    echo_table(
        [
            ("steps", f"{report.first_step} -> {report.step} ({report.num_skipped} skipped)"),
            ("stopped by", report.stopped_by or "-"),
            ("loss, first -> last", f"{_loss(report.first_loss)} -> {_loss(report.last_loss)}"),
            ("tokens/s, whole job", f"{report.tokens_per_second:,.0f}"),
            ("peak memory of a rank", f"{report.peak_memory_bytes / gib:.2f} GiB"),
            ("sent in attention", f"{report.bytes_sent / 2**20:,.1f} MiB over all ranks"),
            (
                "largest logit difference",
                "-" if difference is None else f"{difference:.2e} in {checks}",
            ),
            (
                "lost to saving",
                f"{report.seconds_saving:,.1f} s, {counted(report.failed_saves, 'save')} failed",
            ),
            ("checkpoint", str(report.checkpoint or "-")),
            ("run folder", str(report.run_dir)),
        ],
        title=f"Trained on {counted(report.world_size, 'rank')} = dp {report.dp} x sp {report.sp}",
    )


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
