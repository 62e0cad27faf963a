"""Run every unit that is asked for: models × tasks × lengths."""

from __future__ import annotations

import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...data.tokenizer import tokenizer_digest
from ...errors import UserError
from ..tally import preserved_rng
from ..target import Target
from . import units
from .available import Available, available_tasks
from .catalog import RULER
from .progress import Progress, Say
from .prompts import Fitted, PromptFormat, fit
from .require import quiet, require_harness
from .ruler import NUMPY_SEED, SEED
from .sources import Sources
from .units import UnitResult, UnitStore, read_score, write_harness_files

if TYPE_CHECKING:
    from lm_eval.api.model import LM
    from lm_eval.api.task import Task

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
    earlier: list[UnitResult] = field(default_factory=list)
    """Stored results of the same models that were not asked for now."""
    partial: list[UnitResult] = field(default_factory=list)
    """Those of units that other models lack, which no mean over all of them can count."""

    def with_earlier(self, models: int) -> Findings:
        """All that is stored of so many models, RULER's tasks first."""
        order = {name: place for place, name in enumerate(RULER)}
        stored = sorted(
            [*self.results, *self.earlier],
            key=lambda result: (
                order.get(result.task, len(order)),
                result.task,
                result.length or 0,
            ),
        )
        count = Counter((result.task, result.length) for result in stored)
        results = [r for r in stored if count[r.task, r.length] == models]
        partial = [r for r in stored if count[r.task, r.length] < models]
        scored = {result.task for result in results}
        skipped = {task: why for task, why in self.skipped.items() if task not in scored}
        return Findings(results, skipped, partial=partial)


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
    device, store = options.device_name(), UnitStore(output)
    available = available_tasks(tasks, options.sources)
    findings = Findings(skipped=available.missing)
    if available.ruler or available.standard:  # else the report says so at once
        for task, reason in findings.skipped.items():
            say(f"skipped {task}: {reason}")
    models = [_Model.of(target, options) for target in targets]
    todo = [unit for model in models for unit in _units(model, available, options)]
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
    asked = {(unit.task, unit.length) for unit in todo}
    findings.earlier = [
        result
        for model in models
        for result in store.results(model.target.name)
        if (result.task, result.length) not in asked and model.computed(result)
    ]
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
class _Model:
    target: Target
    form: PromptFormat
    facts: dict[str, Any]
    """What all of its results depend on."""

    @classmethod
    def of(cls, target: Target, options: Options) -> _Model:
        form = PromptFormat(target.tokenizer(), options.chat)
        facts = {
            "weights": target.digest(),
            "tokenizer": tokenizer_digest(form.tokenizer),
            "template": form.tokenizer.chat_template if options.chat else None,
            "dtype": options.dtype,
            "samples": options.samples,
            "versions": units.versions(),
        }
        return cls(target, form, facts)

    def fingerprint(self, task: str, length: int | None, texts: dict[str, str]) -> str:
        """Of a unit; what has no length of ours has no texts of ours either."""
        own = {} if length is None else {"length": length, "texts": texts}
        return units.fingerprint(self.facts | {"task": task} | own)

    def computed(self, result: UnitResult) -> bool:
        """Whether a stored result is of these weights, asked this way; its samples and versions
        are its own."""
        facts = self.facts | {"samples": result.requested, "versions": result.versions}
        mine = replace(self, facts=facts).fingerprint(result.task, result.length, result.texts)
        return mine == result.fingerprint


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


def _units(model: _Model, available: Available, options: Options) -> list[_Unit]:
    target, form, ruler = model.target, model.form, available.ruler
    limit = target.positions()
    too_long = [n for n in options.lengths if ruler and limit is not None and n > limit]
    if too_long:
        raise UserError(
            f"--lengths {too_long[0]}: {target.name} has max_position_embeddings = {limit:,}; ask "
            "for at most that, or evaluate a model trained for more"
        )
    if options.lengths[0] <= ROOMY:
        for spec in ruler:
            # One sample of the smallest length: seconds, before any weights are read.
            fit(spec, options.lengths[0], 1, form, options.sources)
    found = []
    for length in options.lengths:  # short ones first: what stops half-way has whole columns
        for spec in ruler:
            texts = options.sources.describe(spec.source)
            mark = model.fingerprint(spec.name, length, texts)
            found.append(_Unit(target, form, spec.name, length, mark))
    for name, loaded in available.standard.items():
        mark = model.fingerprint(name, None, {})
        found.append(_Unit(target, form, name, None, mark, loaded))
    return found


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
