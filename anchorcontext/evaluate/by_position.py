"""Loss by position of models on disk, over the launcher's ranks: one document, many devices."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..config import load_config
from ..config.sections import ModelSection, SourceSection
from ..data.sources import ProblemLog, open_sources, read_documents
from ..data.store import VALIDATION, WindowDataset, known_meta
from ..errors import UserError, writing
from ..markdown import markdown_table
from ..model import TrainModel, build_model
from ..model.load import DTYPES
from ..parallel import Mesh, build_mesh
from ..train.checkpoint_files import CONFIG
from ..train.export import export_checkpoint
from ..train.launch import Process, start_process
from ..words import counted
from .documents import HeldOutDocuments
from .lengths import length_label
from .positions import (
    PositionBucket,
    check_context,
    position_buckets,
    position_edges,
    position_probes,
    short_probes,
    total_gain,
)
from .probes import Probe
from .tally import Tally, tally

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .target import Target

CHARACTERS_A_TOKEN = 16
"""Text read beyond this many characters a token wanted is not tokenised: none is that dense."""


@dataclass(frozen=True)
class PositionOptions:
    """How loss by position is measured."""

    length: int
    """Tokens of a document that are read, BOS included."""
    short: int = 4096
    """Tokens of the short context; documents that are no longer are not read again."""
    documents: int = 8
    """How many are read, of those that are long enough."""
    texts: tuple[str, ...] = ()
    """Files and folders, as ``data.sources`` takes them, or ``stdlib``; none: the validation split
    of the model's run."""
    sp: int | None = None
    """Ranks that share a document; None: all of the launcher's."""
    dtype: str = "bf16"


@dataclass(frozen=True)
class PositionReport:
    """Loss by position of one model."""

    model: str
    documents: int
    length: int
    source: str
    """Where the documents come from."""
    dp: int
    sp: int
    short_context: int | None
    buckets: list[PositionBucket]
    gain: float | None
    """Loss with everything before a target less that with a short context, over all targets that
    have both; negative where the far context helps."""
    seconds: float


def measure_positions(
    targets: Sequence[Target], options: PositionOptions, folder: Path
) -> list[PositionReport]:
    """Read long documents with every model; collective over the launcher's ranks.

    Args:
        targets: the models.
        options: how.
        folder: seen by all ranks; a checkpoint's weights are exported there for as long.

    Raises:
        UserError: on every rank: no document is long enough, a model has no such positions, or
            ``sp`` does not divide the ranks.
    """
    edges = position_edges(options.length)
    short = options.short if options.short < options.length else None
    if short is not None:
        check_context(short, edges)
    if options.dtype not in DTYPES:
        raise UserError(
            f"--dtype {options.dtype}: loss-by-position computes in {' or '.join(DTYPES)}, as "
            "training does"
        )
    for target in targets:
        limit = target.positions()
        if limit is not None and options.length > limit:
            raise UserError(
                f"--lengths {options.length}: {target.name} has max_position_embeddings = "
                f"{limit:,}; ask for at most that, or evaluate a model trained for more"
            )
    process = start_process()
    mesh = build_mesh(options.sp or process.world_size)
    job = _Job(options, edges, short, process, mesh, folder)
    reports = [_measure(target, job) for target in targets]
    process.close()
    return reports


@dataclass(frozen=True)
class _Job:
    """What is the same for every model."""

    options: PositionOptions
    edges: list[int]
    short: int | None
    process: Process
    mesh: Mesh
    folder: Path


def _measure(target: Target, job: _Job) -> PositionReport:
    started = time.perf_counter()
    options, edges, short, process, mesh = job.options, job.edges, job.short, job.process, job.mesh
    with process.control.together("reading the documents"):
        tokenizer = target.tokenizer()
        bos = target.bos if target.bos is not None else _own_bos(tokenizer)
        documents, source = _documents(target, options, tokenizer, int(bos is not None))
    loading = process.control.together("loading the model")
    with _weights(target, job.folder, process) as path, loading:
        keys = {"path": str(path), "dtype": options.dtype, "gradient_checkpointing": False}
        section = ModelSection.model_validate(keys)
        model = build_model(section, window_tokens=options.length)
    train_model = TrainModel(model).to(process.device)

    def found(probes: list[Probe]) -> Tally:
        return tally(train_model, probes, len(edges) - 1, mesh, process.device, {})

    far = found(position_probes(documents, edges, bos))
    near = None
    if short is not None:
        near = found(short_probes(documents, edges, bos, short))
    buckets = position_buckets(edges, far, near, short)
    return PositionReport(
        model=target.name,
        documents=len(documents),
        length=options.length,
        source=source,
        dp=mesh.dp,
        sp=mesh.sp,
        short_context=short,
        buckets=buckets,
        gain=total_gain(buckets),
        seconds=time.perf_counter() - started,
    )


def _own_bos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The BOS that the tokenizer puts in front by itself."""
    first = tokenizer("a")["input_ids"][0]
    return int(first) if first == tokenizer.bos_token_id else None


def _documents(
    target: Target, options: PositionOptions, tokenizer: PreTrainedTokenizerBase, front: int
) -> tuple[list[np.ndarray], str]:
    wanted = options.length - front
    if options.texts:
        source = ", ".join(options.texts)
        documents, longest = _long_texts(options, tokenizer, wanted)
    else:
        dataset = _validation(target)
        source = f"validation split of {dataset.path}"
        held_out = HeldOutDocuments(dataset)
        documents, longest = held_out.long_ones(wanted, options.documents), held_out.longest
    if not documents:
        raise UserError(
            f"--lengths {options.length}: the longest document of {source} has {longest:,} "
            "tokens; ask for at most that, or give longer ones with --documents"
        )
    return documents, source


def _validation(target: Target) -> WindowDataset:
    if not target.is_checkpoint:
        raise UserError(
            f"loss-by-position: {target.name} is no run of ours, whose held-out documents would be "
            "read; give texts with --documents PATH"
        )
    path = load_config(target.path / CONFIG).data.path
    meta = known_meta(Path(path).expanduser())
    if meta is not None and VALIDATION not in meta["splits"]:
        raise UserError(
            f"loss-by-position: the run's data.path = {path!r} holds nothing out "
            "(data.validation_fraction = 0); give texts with --documents PATH"
        )
    return WindowDataset(path, VALIDATION)


def _long_texts(
    options: PositionOptions, tokenizer: PreTrainedTokenizerBase, wanted: int
) -> tuple[list[np.ndarray], int]:
    """The first long documents of the sources, and the tokens of the longest one seen."""
    entries = [
        SourceSection.model_validate(
            {"name": text, "kind": "stdlib"} if text == "stdlib" else {"name": text, "path": text}
        )
        for text in options.texts
    ]
    found: list[np.ndarray] = []
    longest = 0
    for document in read_documents(open_sources(entries), ProblemLog("skip")):
        if document.ids is not None:
            ids = document.ids.astype(np.int64)
        else:
            text = document.text[: CHARACTERS_A_TOKEN * wanted]
            ids = np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)
        longest = max(longest, len(ids))
        if len(ids) >= wanted:
            found.append(ids[:wanted])
            if len(found) == options.documents:
                break
    return found, longest


@contextmanager
def _weights(target: Target, folder: Path, process: Process) -> Iterator[Path]:
    """A Hugging Face folder of the weights; rank 0 exports a checkpoint for all."""
    if not target.is_checkpoint:
        yield target.path
        return
    path = folder / f".{target.name}.hf"
    try:
        with process.control.together("exporting the checkpoint"):
            if process.rank == 0:
                with writing("--output", folder):
                    export_checkpoint(
                        target.path, path, tokenizer=target.tokenizer_dir, overwrite=True
                    )
        yield path
    finally:
        if process.rank == 0:
            shutil.rmtree(path, ignore_errors=True)


def position_table(
    reports: Sequence[PositionReport],
) -> tuple[list[str], list[list[str]], str]:
    """Headers, rows and a note: the losses of all models side by side, and their gains."""
    first, gains = reports[0], reports[0].short_context is not None
    head = ["tokens before the target", "targets"]
    for report in reports:
        name = "" if len(reports) == 1 else f"{report.model}: "
        head += [f"{name}loss", f"{name}perplexity", *([f"{name}gain"] if gains else [])]
    rows = []
    for index, bucket in enumerate(first.buckets):
        row = [f"{bucket.start:,} to {bucket.stop:,}", f"{bucket.targets:,}"]
        for report in reports:
            one = report.buckets[index]
            row += [_figure(one.loss), _figure(one.perplexity, 2)]
            row += [_figure(one.gain)] if gains else []
        rows.append(row)
    note = (
        f"Loss by position: {', '.join(report.model for report in reports)}; "
        f"{counted(first.documents, 'document')} of {first.length:,} tokens "
        f"({first.source}), dp {first.dp} × sp {first.sp}."
    )
    if gains:
        over_all = ", ".join(_figure(report.gain) for report in reports)
        note += (
            f" Gain: loss less that of the same targets with the last {first.short_context:,} "
            f"tokens only, negative where the far context helps; over all {over_all}."
        )
    return head, rows, note


def report_markdown(reports: Sequence[PositionReport]) -> str:
    """The table as a page section."""
    head, rows, note = position_table(reports)
    return f"{note}\n\n{markdown_table(head, rows)}"


def _figure(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def draw_positions(reports: Sequence[PositionReport], path: Path) -> None:
    """Loss over position of every model; the short context's dashed.

    Raises:
        UserError: matplotlib is not installed, or does not know the format.
    """
    from ..watch.draw import DOCUMENT_COLORS, new_figure, save_figure

    figure = new_figure(width=7.5, height=4.5)
    axes = figure.add_subplot()
    for index, report in enumerate(reports):
        color = DOCUMENT_COLORS[index % len(DOCUMENT_COLORS)]
        for name, style in (("loss", "o-"), ("short_loss", "o--")):
            points = [(b.stop, getattr(b, name)) for b in report.buckets]
            points = [point for point in points if point[1] is not None]
            if not points:
                continue
            x, y = zip(*points, strict=True)
            short = f", last {report.short_context:,} only" if name == "short_loss" else ""
            axes.plot(x, y, style, color=color, label=f"{report.model}{short}")
    axes.set_xscale("log", base=2)
    ends = [bucket.stop for bucket in reports[0].buckets]
    axes.set_xticks(ends, [length_label(end) for end in ends])
    axes.set_xlabel("tokens before the target, up to")
    axes.set_ylabel("nats a target")
    axes.grid(alpha=0.2)
    axes.legend(frameon=False)
    save_figure(figure, path)
