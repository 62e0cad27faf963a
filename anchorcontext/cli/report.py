"""``anchorcontext report``: a run in one table."""

from __future__ import annotations

from pathlib import Path

import click

from anchorcontext.cli.common import Outcome, echo_table, plain_command

MIB = 2**20
NOTHING_YET = "-"


@plain_command
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path, file_okay=False))
def command(run: Path) -> Outcome:
    """Sum up a run: loss, speed, memory, traffic, parity, and where everything lies.

    RUN is the run's folder, output_dir/name of its config.
    """
    from anchorcontext.watch.summary import summarize

    found = summarize(run)
    folders = [("metrics", run / "metrics.jsonl"), ("config", run / "config.yaml")]
    folders += [("checkpoint", path) for path in found.checkpoints]
    folders += [("Hugging Face folder", path) for path in sorted(run.glob("hf*")) if path.is_dir()]
    echo_table(
        [
            ("steps", f"{found.steps:,}, {found.skipped} skipped, started {found.starts} times"),
            ("loss, first -> last", f"{_loss(found.first_loss)} -> {_loss(found.last_loss)}"),
            ("tokens", f"{found.tokens:,}"),
            ("tokens/s, median step", _number(found.median_tokens_per_second, ",.0f")),
            ("peak memory of a rank", f"{found.peak_memory_bytes / MIB:,.0f} MiB"),
            ("sent in attention", f"{found.bytes_sent / MIB:,.1f} MiB, all ranks, all steps"),
            ("busiest rank / mean", _number(found.attention_balance, ".2f") + " of attention"),
            (
                "largest logit difference",
                f"{_number(found.largest_logit_difference, '.2e')} in {found.parity_checks} parity "
                f"checks, {found.parity_failures} failed",
            ),
            *((name, str(path)) for name, path in folders),
        ],
        title=f"Run {run}",
    )
    return Outcome(found)


def _loss(value: float | None) -> str:
    return _number(value, ".4f")


def _number(value: float | None, form: str) -> str:
    return NOTHING_YET if value is None else format(value, form)
