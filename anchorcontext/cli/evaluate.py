"""``anchorcontext evaluate``: did long context get better, and what did it cost."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from anchorcontext.cli.common import (
    Outcome,
    echo,
    echo_table,
    is_main_rank,
    plain_command,
    write_json,
)
from anchorcontext.errors import UserError, writing
from anchorcontext.words import counted

if TYPE_CHECKING:
    from anchorcontext.evaluate.harness.run import Options
    from anchorcontext.evaluate.target import Target


@dataclass(frozen=True)
class Part:
    """What one kind of task found."""

    report: Any
    """What was asked for; goes into ``--json``."""
    markdown: str
    """The same for ``--markdown``; empty: nothing of it has a score."""
    kept: Any
    """With what earlier calls found; goes into ``results.json``. Empty: nothing has a score."""
    kept_markdown: str
    """The same for ``results.md``."""
    complete: bool = True
    """Everything that was asked for has a score."""


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
    "--samples",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="Of each task at each length.",
)
@click.option("--all-samples", is_flag=True, help="RULER's 500; whole data sets elsewhere.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs/evaluation"),
    show_default=True,
    help="Every finished unit is kept here, and not computed again.",
)
@click.option("--batch-size", type=click.IntRange(min=1), help="Default: by the length.")
@click.option(
    "--dtype", type=click.Choice(["bf16", "fp32", "fp16"]), default="bf16", show_default=True
)
@click.option("--device", default="auto", metavar="auto|cpu|cuda[:N]", show_default=True)
@click.option(
    "--haystack",
    type=click.Path(path_type=Path),
    help="A text (file or folder) for RULER's essays, which are a download.",
)
@click.option(
    "--qa",
    type=click.Path(path_type=Path),
    multiple=True,
    help="A SQuAD or HotpotQA JSON file, downloads too; may be given twice.",
)
@click.option("--download", is_flag=True, help="Fetch what is missing from the hub.")
@click.option("--chat-template", "chat", is_flag=True, help="Ask through the chat template.")
@click.option(
    "--bos/--no-bos",
    default=None,
    help="Put BOS in front of prompts; default: as training did, or as the tokenizer does.",
)
@click.option(
    "--documents",
    multiple=True,
    metavar="PATH",
    help="Texts for loss-by-position, as data.sources takes them, or stdlib; may be repeated. "
    "Default: the validation split of the model's run.",
)
@click.option(
    "--num-documents",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Of them, that are long enough.",
)
@click.option(
    "--short",
    type=click.IntRange(min=4),
    default=4096,
    show_default=True,
    help="Tokens of the short context that loss-by-position compares with.",
)
@click.option(
    "--sp",
    type=click.IntRange(min=1),
    help="Ranks that share a document in loss-by-position; default: all of torchrun's.",
)
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder of the tokenizer; default: the model's, or of the run's prepared data.",
)
@click.option(
    "--snapshots",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Mean and spread over this many of a run's last checkpoints; the paper: 5.",
)
@click.option("--apart", type=click.IntRange(min=1), help="Steps between them; the paper: 10.")
@click.option(
    "--markdown",
    "page",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the tables into this page too, between the markers of --section.",
)
@click.option(
    "--section", default="evaluation", show_default=True, help="Name of the markers in that page."
)
def command(
    sources: tuple[str, ...],
    tasks: str,
    lengths: str,
    samples: int,
    all_samples: bool,
    output: Path,
    batch_size: int | None,
    dtype: str,
    device: str,
    haystack: Path | None,
    qa: tuple[Path, ...],
    download: bool,
    chat: bool,
    bos: bool | None,
    documents: tuple[str, ...],
    num_documents: int,
    short: int,
    sp: int | None,
    tokenizer: Path | None,
    snapshots: int,
    apart: int | None,
    page: Path | None,
    section: str,
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
    if LOSS_BY_POSITION in asked and device != "auto":
        raise UserError(
            f"--device {device}: loss-by-position runs where training does, on the launcher's "
            "GPUs if there are any; leave it out, or hide GPUs with CUDA_VISIBLE_DEVICES="
        )
    targets = find_targets(sources, snapshots=snapshots, apart=apart, tokenizer=tokenizer, bos=bos)

    from anchorcontext.cli.by_position import run_by_position
    from anchorcontext.evaluate.by_position import PositionOptions
    from anchorcontext.evaluate.harness.run import Options
    from anchorcontext.evaluate.harness.sources import Sources

    options = Options(
        lengths=tokens,
        samples=None if all_samples else samples,
        batch_size=batch_size,
        dtype=dtype,
        device=device,
        chat=chat,
        sources=Sources(haystack, list(qa), download),
    )
    positions: PositionOptions | None = None
    if LOSS_BY_POSITION in asked:
        positions = PositionOptions(
            length=max(tokens),
            short=short,
            documents=num_documents,
            texts=documents,
            sp=sp,
            dtype=dtype,
        )
    parts = {}
    if of_harness:
        parts["harness"] = run_harness(targets, of_harness, options, output, echo)
    if positions is not None:
        parts[LOSS_BY_POSITION] = run_by_position(targets, positions, output, echo)
    if is_main_rank():
        write_results(parts, targets, output)
        if page is not None:
            _write_page(parts, page, section)
    complete = all(part.complete for part in parts.values())
    return Outcome({kind: p.report for kind, p in parts.items()}, exit_code=0 if complete else 1)


def write_results(parts: dict[str, Part], targets: Sequence[Target], output: Path) -> None:
    """Put what has scores into the result files. Kinds of tasks that were not asked for now stay
    there as they are, if they are of the same weights."""
    from anchorcontext.markdown import write_section

    scored = {kind: part for kind, part in parts.items() if part.kept}
    data, tables = output / "results.json", output / "results.md"
    if not scored:
        echo(f"nothing was scored; {data} and {tables} stay as they are")
        return
    weights = {"weights": {target.name: target.digest() for target in targets}}
    with writing("--output", output):
        old = _written_before(data)
        if {key: old.get(key) for key in weights} != weights:
            old = {}
            tables.unlink(missing_ok=True)
        write_json(data, old | weights | {kind: part.kept for kind, part in scored.items()})
        for kind, part in scored.items():
            write_section(tables, kind, part.kept_markdown)
    echo(f"written: {data}, {tables}")


def _written_before(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _write_page(parts: dict[str, Part], page: Path, section: str) -> None:
    """What was asked for, beside the command that asked; nothing, if nothing has a score."""
    from anchorcontext.markdown import write_section

    texts = [part.markdown for part in parts.values() if part.markdown]
    if texts:
        with writing("--markdown", page):
            write_section(page, section, "\n\n".join([_provenance(), *texts]))
        echo(f"written: {page}")


def run_harness(
    targets: Sequence[Target],
    tasks: Sequence[str],
    options: Options,
    output: Path,
    say: Callable[[str], None],
) -> Part:
    """RULER and the harness's other tasks; prints their tables."""
    from anchorcontext.evaluate.harness.report import (
        markdown,
        notes,
        other_rows,
        score_rows,
        summarize,
    )
    from anchorcontext.evaluate.harness.run import run_units

    findings = run_units(targets, tasks, options, output, say)
    if findings.reused:
        say(f"{counted(findings.reused, 'result')} of earlier calls")
    report = summarize(findings)
    headers, rows = score_rows(report)
    if report.lengths:
        echo_table(rows, headers)
    if others := other_rows(report):
        echo_table(others, ["task", "metric", "score"])
    for note in notes(report):
        say(note)
    kept = summarize(findings.with_earlier(len(targets)))
    return Part(
        report,
        markdown(report) if report.results else "",
        kept if kept.results else None,
        markdown(kept),
        complete=not findings.skipped,
    )


def _provenance() -> str:
    """The command, the machine, the date and the versions, for a page."""
    from anchorcontext.environment import measured_on
    from anchorcontext.evaluate.harness.units import versions

    command = shlex.join(["anchorcontext", *sys.argv[1:]])
    found = {name: number for name, number in versions().items() if name != "torch"}
    packages = ", ".join(f"{name} {number}" for name, number in found.items())
    return f"`{command}`\n\n{measured_on()}, {packages}."
