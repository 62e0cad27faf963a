"""``anchorcontext evaluate``: did long context get better, and what did it cost.

::

    harness.py      RULER and the harness's other tasks: options, run, tables
    by_position.py  loss by position: options, run, table, figure
    results.py      where what was found goes: options, results.json, pages
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from anchorcontext.cli.common import Outcome, echo, is_main_rank, option_group, plain_command
from anchorcontext.cli.evaluate.by_position import position_options, run_by_position
from anchorcontext.cli.evaluate.harness import harness_options, run_harness
from anchorcontext.cli.evaluate.results import result_options, write_page, write_results
from anchorcontext.errors import UserError

model_options = option_group(
    "models",
    snapshots=click.option(
        "--snapshots",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        help="Mean and spread over this many of a run's last checkpoints; the paper: 5.",
    ),
    apart=click.option(
        "--apart", type=click.IntRange(min=1), help="Steps between them; the paper: 10."
    ),
    tokenizer=click.option(
        "--tokenizer",
        type=click.Path(path_type=Path, exists=True, file_okay=False),
        help="Folder of the tokenizer; default: the model's, or of the run's prepared data.",
    ),
    bos=click.option(
        "--bos/--no-bos",
        default=None,
        help="Put BOS in front of prompts; default: as training did, or as the tokenizer does.",
    ),
)
"""What :func:`anchorcontext.evaluate.target.find_targets` takes beside MODEL."""


@plain_command
@click.argument("sources", metavar="MODEL...", nargs=-1, required=True)
@click.option(
    "--tasks",
    default="ruler-11",
    show_default=True,
    metavar="NAMES",
    help="ruler-11 (the paper's set for LLaMA-2), ruler-13, ruler-synthetic (needs no texts), "
    "single tasks (niah_single_1, vt, ...), longbench, hellaswag, mmlu, loss-by-position.",
)
@click.option(
    "--lengths",
    default="4096",
    show_default=True,
    metavar="TOKENS",
    help="Of prompt and answer, such as 4000,4K,128K; K is 1,024.",
)
@click.option(
    "--dtype", type=click.Choice(["bf16", "fp32", "fp16"]), default="bf16", show_default=True
)
@model_options
@harness_options
@position_options
@result_options
def command(
    sources: tuple[str, ...],
    tasks: str,
    lengths: str,
    dtype: str,
    models: dict[str, Any],
    harness: dict[str, Any],
    positions: dict[str, Any],
    results: dict[str, Any],
) -> Outcome:
    """Score models on long-context tasks, through lm-evaluation-harness (extra eval).

    MODEL is a Hugging Face folder, a run, its config (YAML), or a checkpoint; several are taken as
    snapshots of one model: their mean is shown with its spread.

    \b
      anchorcontext evaluate runs/models/smollm2-135m --tasks ruler-synthetic --lengths 1K,2K,4K
      anchorcontext evaluate runs/my-run --snapshots 5 --apart 10 --tasks ruler-11 --lengths 4K,64K

    Nothing is downloaded unless --download says so: a task whose texts are not on this machine is
    skipped by name. Exits 1 when a task was skipped.
    """
    from anchorcontext.evaluate.harness.catalog import LOSS_BY_POSITION, expand_tasks
    from anchorcontext.evaluate.lengths import parse_lengths
    from anchorcontext.evaluate.target import find_targets

    # Mistyped lengths, names and folders are refused before torch and transformers are imported.
    tokens, asked = tuple(parse_lengths(lengths)), expand_tasks(tasks)
    of_harness = [task for task in asked if task != LOSS_BY_POSITION]
    if LOSS_BY_POSITION in asked and harness["device"] != "auto":
        raise UserError(
            f"--device {harness['device']}: loss-by-position runs where training does, on the "
            "launcher's GPUs if there are any; leave it out, or hide GPUs with "
            "CUDA_VISIBLE_DEVICES="
        )
    targets = find_targets(sources, **models)
    output = results["output"]
    parts = {}
    if of_harness:
        parts["harness"] = run_harness(targets, of_harness, tokens, dtype, harness, output, echo)
    if LOSS_BY_POSITION in asked:
        parts[LOSS_BY_POSITION] = run_by_position(
            targets, max(tokens), dtype, positions, output, echo
        )
    if is_main_rank():
        write_results(parts, targets, output)
        if results["page"] is not None:
            write_page(parts, results["page"], results["section"])
    complete = all(part.complete for part in parts.values())
    return Outcome({kind: p.report for kind, p in parts.items()}, exit_code=0 if complete else 1)
