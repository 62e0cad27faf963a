"""Run every unit that is asked for: models × tasks × lengths."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...data.tokenizer import tokenizer_digest
from ...errors import UserError
from ..tally import preserved_rng
from ..target import Target
from . import units
from .catalog import RULER, STANDARD, RulerTask
from .progress import Progress, Say
from .prompts import Fitted, PromptFormat, fit
from .require import hub, quiet, require_harness, sentence_splitter
from .ruler import NUMPY_SEED, SEED
from .sources import Sources
from .units import UnitResult, UnitStore, read_score, write_harness_files

if TYPE_CHECKING:
    from lm_eval.api.model import LM
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

# Prompt tokens of a batch: more only moves memory, since a prompt of 4K tokens fills the cores.
BATCH_TOKENS = 16384
RULER_SAMPLES = 500
ROOMY = 8192  # tokens that every task's smallest prompt fits
DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}


@dataclass(frozen=True)
class Options:
    """How tasks are run; what is scored does not depend on the batch size or the device."""

    lengths: tuple[int, ...] = (4096,)
    samples: int | None = 100
    """A unit's samples; None: 500 for RULER, as in its paper, all for the other tasks."""
    batch_size: int | None = None
    """None: as many as fill :data:`BATCH_TOKENS` tokens."""
    dtype: str = "bf16"
    device: str = "auto"
    chat: bool = False
    sources: Sources = field(default_factory=Sources)

    def device_name(self) -> str:
        """``cuda`` where there is a GPU and it is wanted, else ``cpu``.

        Raises:
            UserError: a GPU is asked for and there is none.
        """
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise UserError(
                f"--device {self.device}: torch sees no GPU here; use --device cpu, or run on a "
                "machine with one"
            )
        if self.device != "auto":
            return self.device
        return "cuda" if torch.cuda.is_available() else "cpu"

    def batch(self, length: int | None) -> int:
        """Prompts at once."""
        return self.batch_size or max(1, min(16, BATCH_TOKENS // (length or 2048)))


@dataclass
class Findings:
    """Everything that was scored, and what was not, and why."""

    results: list[UnitResult] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Task -> why it could not run here."""
    reused: int = 0
    """Results that an earlier call had stored."""


def run_units(
    targets: Sequence[Target],
    tasks: Sequence[str],
    options: Options,
    output: Path,
    say: Say = lambda _: None,
) -> Findings:
    """Score every model in every task at every length; what is stored is not computed again.

    Prompts that cannot fit a length, and lengths that a model has no positions for, are refused
    before any weights are read. A task whose texts are not on this machine is skipped by name.

    Args:
        targets: the models.
        tasks: names as :func:`anchorcontext.evaluate.harness.catalog.expand_tasks` gives them.
        options: how they are run.
        output: folder of the :class:`UnitStore`.
        say: is told what is done and how long the rest may take.

    Raises:
        UserError: the extra is missing, a length is too small or too great, there is no GPU.
    """
    require_harness()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        raise UserError(
            f"the harness's tasks run in one process, here are {ranks} ranks: leave the launcher "
            "out, or ask for loss-by-position alone under it"
        )
    device, findings, store = options.device_name(), Findings(), UnitStore(output)
    ruler, standard = _available(tasks, options, findings)
    for task, reason in findings.skipped.items():
        say(f"skipped {task}: {reason}")
    todo = [unit for target in targets for unit in _units(target, ruler, standard, options)]
    progress = Progress([unit.work for unit in todo], say)
    for target in targets:
        missing = []
        for unit in (unit for unit in todo if unit.target is target):
            result = store.load(target.name, unit.task, unit.length, unit.fingerprint)
            if result is None:
                missing.append(unit)
            else:
                findings.results.append(result)
                findings.reused += 1
                progress.skip(unit.work)
        findings.results += _compute(target, missing, options, device, store, progress)
    order = {name: place for place, name in enumerate(tasks)}
    findings.results.sort(key=lambda result: (order[result.task], result.length or 0))
    return findings


def score_fitted(fitted: Fitted, lm: LM, *, chat: bool = False) -> dict[str, Any]:
    """Ask ``lm`` every prompt of a RULER task; the harness's results and samples."""
    return evaluate_tasks({fitted.spec.name: fitted.task}, lm, chat=chat)


def evaluate_tasks(
    tasks: dict[str, Task],
    lm: LM,
    *,
    groups: dict[str, Any] | None = None,
    limit: int | None = None,
    chat: bool = False,
) -> dict[str, Any]:
    """The harness's evaluation of loaded tasks, with the seeds and defaults of its command line."""
    from lm_eval.evaluator import evaluate

    for task in tasks.values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=NUMPY_SEED)
    with _seeds_of_the_harness(), quiet(bars=sys.stderr.isatty()):
        results = evaluate(
            lm,
            {"tasks": tasks, "groups": groups or {}},
            limit=limit,
            apply_chat_template=chat,
            fewshot_as_multiturn=True,
        )
    assert results is not None, "only rank 0 evaluates"
    return dict(results)


def _compute(
    target: Target,
    missing: Sequence[_Unit],
    options: Options,
    device: str,
    store: UnitStore,
    progress: Progress,
) -> list[UnitResult]:
    """Run a model's units and store them; the weights are gone when this returns."""
    if not missing:
        return []
    results = []
    with open_model(target, missing[0].form.tokenizer, options, device) as lm:
        for unit in missing:
            result = _score(unit, lm, options, store)
            store.save(result)
            results.append(result)
            progress.step(unit.work, unit.label, result)
    return results


@contextmanager
def open_model(target: Target, tokenizer: Any, options: Options, device: str) -> Iterator[LM]:
    """The weights as the harness's ``hf`` model, for as long as the block lasts."""
    from lm_eval.models.huggingface import HFLM

    limit = target.positions() or max(options.lengths)
    with target.folder() as folder, quiet():
        lm = HFLM(
            pretrained=str(folder),
            tokenizer=tokenizer,
            dtype=DTYPES[options.dtype],
            device=device,
            batch_size=1,
            max_length=limit,
        )
    yield lm


@dataclass(frozen=True)
class _Unit:
    target: Target
    form: PromptFormat
    task: str
    length: int | None
    fingerprint: str
    loaded: dict[str, Any] | None = None
    """The harness's tasks and groups, where they are not RULER's."""

    @property
    def work(self) -> float:
        """Relative time it takes."""
        return float(self.length or 16384)

    @property
    def label(self) -> str:
        place = "" if self.length is None else f" @ {self.length:,}"
        return f"{self.target.name}: {self.task}{place}"


def _units(
    target: Target,
    ruler: Sequence[RulerTask],
    standard: dict[str, dict[str, Any]],
    options: Options,
) -> list[_Unit]:
    limit = target.positions()
    too_long = [n for n in options.lengths if ruler and limit is not None and n > limit]
    if too_long:
        raise UserError(
            f"--lengths {too_long[0]}: {target.name} has max_position_embeddings = {limit:,}; ask "
            "for at most that, or evaluate a model trained for more"
        )
    form = PromptFormat(target.tokenizer(), options.chat)
    facts = {
        "weights": target.digest(),
        "tokenizer": tokenizer_digest(form.tokenizer),
        "template": form.tokenizer.chat_template if options.chat else None,
        "dtype": options.dtype,
        "samples": options.samples,
        "versions": units.versions(),
    }
    if options.lengths[0] <= ROOMY:
        for spec in ruler:
            # One sample of the smallest length: seconds, before any weights are read.
            fit(spec, options.lengths[0], 1, form, options.sources)
    found = []
    for length in options.lengths:  # short ones first: what stops half-way has whole columns
        for spec in ruler:
            texts = options.sources.describe(spec.source)
            mark = units.fingerprint(facts | {"task": spec.name, "length": length, "texts": texts})
            found.append(_Unit(target, form, spec.name, length, mark))
    for name, loaded in standard.items():
        mark = units.fingerprint(facts | {"task": name})
        found.append(_Unit(target, form, name, None, mark, loaded))
    return found


def _available(
    tasks: Sequence[str], options: Options, findings: Findings
) -> tuple[list[RulerTask], dict[str, dict[str, Any]]]:
    """RULER's tasks and the harness's others that can be made here; the rest is put on record."""
    ruler: list[RulerTask] = []
    standard: dict[str, dict[str, Any]] = {}
    for name in tasks:
        if name in RULER:
            sentence_splitter(download=options.sources.download)
            reason = options.sources.missing(RULER[name].source)
            if reason is None:
                ruler.append(RULER[name])
            else:
                findings.skipped[name] = reason
            continue
        try:
            with hub(download=options.sources.download), quiet():
                loaded = _manager(name).load([name])
                standard[name] = {"tasks": loaded["tasks"], "groups": loaded["groups"]}
        except Exception as error:
            # The hub's client and the data sets' own scripts raise what they like; whatever it is,
            # the task cannot be scored here and must not count as 0.
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            offer = "" if options.sources.download else "; --download lets it be fetched"
            findings.skipped[name] = f"its data set is not on this machine ({reason[:120]}){offer}"
    return ruler, standard


@cache
def _manager(name: str) -> TaskManager:
    """The harness's index of the folder of a task known to be there; of all tasks for others."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    folder = Path(str(lm_eval.__file__)).parent / "tasks" / name
    if name in STANDARD and folder.is_dir():
        return TaskManager(include_path=str(folder), include_defaults=False)
    return TaskManager()


def _score(unit: _Unit, lm: Any, options: Options, store: UnitStore) -> UnitResult:
    """Run one unit, and leave the harness's own files of it."""
    begin = time.perf_counter()
    lm.batch_size_per_gpu = options.batch(unit.length)
    spec = RULER.get(unit.task)
    tokens: dict[str, Any] = dict.fromkeys(("prompt_tokens", "longest", "sized_for"))
    if spec is not None:
        assert unit.length is not None
        samples = options.samples or RULER_SAMPLES
        fitted = fit(spec, unit.length, samples, unit.form, options.sources)
        results = score_fitted(fitted, lm, chat=options.chat)
        tokens = {
            "prompt_tokens": sum(fitted.tokens) / len(fitted.tokens),
            "longest": max(fitted.tokens) + spec.generates,
            "sized_for": fitted.sized_for,
        }
    else:
        assert unit.loaded is not None
        results = evaluate_tasks(**unit.loaded, lm=lm, limit=options.samples, chat=options.chat)
    place = store.place(unit.target.name, unit.task, unit.length)
    write_harness_files(results, place, unit.target.path)
    score, stderr, metric, scored = read_score(results, unit.task, unit.length)
    return UnitResult(
        model=unit.target.name,
        task=unit.task,
        length=unit.length,
        score=score,
        stderr=stderr,
        metric=metric,
        samples=scored,
        requested=options.samples,
        batch_size=lm.batch_size_per_gpu,
        seconds=time.perf_counter() - begin,
        texts=options.sources.describe(spec.source) if spec is not None else {},
        fingerprint=unit.fingerprint,
        versions=units.versions(),
        **tokens,
    )


@contextmanager
def _seeds_of_the_harness() -> Iterator[None]:
    """Its command line's seeds; the caller's random numbers come back untouched."""
    with preserved_rng(torch.device("cpu")):
        random.seed(SEED)
        np.random.seed(NUMPY_SEED)
        torch.manual_seed(NUMPY_SEED)
        yield
