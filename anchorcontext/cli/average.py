"""``anchorcontext average``: the mean of snapshots' weights, or of their scores."""

from __future__ import annotations

from pathlib import Path

import click

from anchorcontext.cli.common import Outcome, echo, echo_table, plain_command
from anchorcontext.errors import UserError, writing
from anchorcontext.words import counted


@plain_command
@click.argument("sources", metavar="SNAPSHOT...", nargs=-1, required=True)
@click.option("--out", type=click.Path(path_type=Path), help="The Hugging Face folder to make.")
@click.option(
    "--snapshots",
    type=click.IntRange(min=2),
    help="Of a run: its last so many checkpoints; the paper: 5.",
)
@click.option("--apart", type=click.IntRange(min=1), help="Steps between them; the paper: 10.")
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), help="Default: the snapshots'.")
@click.option("--overwrite", is_flag=True, help="Replace OUT when it exists.")
@click.option("--scores", is_flag=True, help="SNAPSHOT... are result files of `evaluate`.")
def command(
    sources: tuple[str, ...],
    out: Path | None,
    snapshots: int | None,
    apart: int | None,
    dtype: str | None,
    overwrite: bool,
    scores: bool,
) -> Outcome:
    """Average snapshots of one model: their weights in fp32, or their scores.

    SNAPSHOT is a checkpoint or a Hugging Face folder, or one run with --snapshots.

    \b
      anchorcontext average runs/my-run --snapshots 5 --apart 10 --out out/mean
      anchorcontext average --scores runs/evaluation/a/results.json runs/evaluation/b/results.json
    """
    if scores:
        options = {
            "--out": out is not None,
            "--snapshots": snapshots is not None,
            "--apart": apart is not None,
            "--dtype": dtype is not None,
            "--overwrite": overwrite,
        }
        unused = [name for name, given in options.items() if given]
        if unused:
            raise UserError(
                f"--scores with {', '.join(unused)}: these are of the mean of weights; leave them "
                "out, or --scores"
            )
        from anchorcontext.evaluate.scores import average_scores

        found = average_scores([Path(source) for source in sources])
        rows = [
            (s.name, f"{s.mean:.4g}", "-" if s.deviation is None else f"{s.deviation:.2g}", s.count)
            for s in found
        ]
        echo_table(rows, ("score", "mean", "standard deviation", "results"))
        return Outcome(found)
    if out is None:
        raise UserError("--out is missing: name the folder to make, or give --scores")
    from anchorcontext.evaluate.target import find_targets

    targets = find_targets(sources, snapshots=snapshots or 1, apart=apart, at_least=2)

    from anchorcontext.evaluate.average import average_weights

    with writing("--out", out):
        report = average_weights(targets, out, dtype=dtype, overwrite=overwrite)
    written = report.export
    echo(
        f"{out}: mean of {', '.join(report.snapshots)}; {counted(written.num_tensors, 'tensor')}, "
        f"{written.num_parameters / 1e6:.1f}M parameters, {written.dtype}"
    )
    return Outcome(report)
