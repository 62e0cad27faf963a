"""``diagnose shift``: RoPE's shift invariance, measured walk by walk and text by text.

Texts are the outermost loop, so that a run may be stopped after any of them. What is reported
stands on texts that all settings have: curves that are compared are of the same words.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ...weights import folder_digest
from ..difference import Scores, attention_differences
from ..measures import Deviation, DeviationSum
from ..models import lab_model
from ..rotary import Rotary
from ..texts import Text, read_texts
from ..units import Progress, Tell, made_by
from ..walk import Variant, walk
from ..workers import Workers
from .settings import KINDS, ShiftSettings, Walk
from .store import ResultStore, WalkResult


@dataclass(frozen=True)
class WalkUnit:
    """One walk over one text, and the file of its result."""

    walk: Walk
    text: Text
    path: Path

    @property
    def name(self) -> str:
        """For the bar."""
        return f"text {self.text.number} {self.walk.setting} {self.walk.kind}"

    @property
    def work(self) -> float:
        """Its share of the time."""
        return self.walk.work()


def run_shift(
    settings: ShiftSettings, out: Path, *, workers: Workers, tell: Tell | None = None
) -> None:
    """Measure what is not yet stored under ``out``; ``settings`` come from ``check_settings``.

    Raises:
        UserError: the model or the texts cannot be read, or ``out`` not be written.
    """
    store = ResultStore(out)
    units = list(missing_units(settings, store))
    progress = Progress(units, tell)
    with ExitStack() as stack:
        for (_, setting), group in groupby(units, lambda u: (u.text.number, u.walk.setting)):
            stack.close()  # one model at a time
            model, rotary = stack.enter_context(
                lab_model(
                    settings.model,
                    setting,
                    workers=workers,
                    longest=settings.text_tokens,
                    seed=settings.seed,
                    device=settings.device,
                )
            )
            for unit in group:
                _measure_and_store(unit, settings, store, model, rotary, workers, progress)


def missing_units(settings: ShiftSettings, store: ResultStore) -> Iterator[WalkUnit]:
    """What has no stored result, text by text."""
    digest = folder_digest(settings.model)
    texts = read_texts(
        settings.model,
        settings.texts,
        settings.text_tokens,
        source=settings.source,
        seed=settings.seed,
    )
    for text in texts:
        for todo in settings.walks():
            path = store.path(todo, settings.fingerprint(todo, digest), text.number)
            if store.load(path, todo, text.digest) is None:
                yield WalkUnit(todo, text, path)


def _measure_and_store(
    unit: WalkUnit,
    settings: ShiftSettings,
    store: ResultStore,
    model: PreTrainedModel,
    rotary: Rotary | None,
    workers: Workers,
    progress: Progress,
) -> None:
    start, processor = time.perf_counter(), time.process_time()
    num_layers = model.config.get_text_config().num_hidden_layers
    deviations = measure(
        model,
        unit.text.ids,
        unit.walk,
        workers=workers,
        rotary=rotary,
        scores=settings.scores,
        same_input=settings.same_input,
        after_layer=lambda layer: progress.at(unit, layer / num_layers),
    )
    facts = _facts(unit, workers, settings) | {
        "seconds": round(time.perf_counter() - start, 2),
        "processor_seconds": round(time.process_time() - processor, 2),
    }
    store.save(unit.path, unit.walk, WalkResult(deviations, facts))
    progress.stored(unit)


def measure(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    todo: Walk,
    *,
    workers: Workers,
    rotary: Rotary | None = None,
    scores: Scores = "fp32",
    same_input: bool = False,
    after_layer: Callable[[int], None] = lambda layer: None,
) -> dict[tuple[int, int], Deviation]:
    """The deviations of one walk over one text, by (shift, length).

    Args:
        model, rotary: from :func:`~..models.lab_model`.
        input_ids: int64, at least ``todo.tokens`` of them.
        after_layer: called with the number of layers that are done.
    """
    ids = input_ids[: todo.tokens].to(model.device)
    positions = torch.arange(todo.tokens, device=model.device)
    variants = [
        Variant(positions + shift, rotary=rotary) for shift in (todo.reference, *todo.shifts)
    ]
    sums = {pair: DeviationSum(pair[1]) for pair in todo.pairs}
    for states in walk(model, ids, variants, workers=workers, same_input=same_input):
        reference, *others = states.attention
        differences = attention_differences(
            reference, others, workers=workers, lengths=todo.lengths, scores=scores
        )
        for (shift, length), total in sums.items():
            total.add(differences, todo.lengths.index(length), todo.shifts.index(shift))
        after_layer(states.layer + 1)
    return {pair: total.result() for pair, total in sums.items()}


def stored_results(settings: ShiftSettings, out: Path) -> dict[Walk, list[WalkResult]]:
    """Results by walk, in order of texts: of each kind, those of the texts that all settings have.

    A kind of which no text is complete is left out.
    """
    store, digest = ResultStore(out), folder_digest(settings.model)
    found: dict[Walk, list[WalkResult]] = {}
    for kind in KINDS:
        paths = {
            todo: partial(store.path, todo, settings.fingerprint(todo, digest))
            for todo in settings.walks()
            if todo.kind == kind
        }
        for number in range(settings.texts):
            results = {todo: store.load(path(number), todo) for todo, path in paths.items()}
            if not all(results.values()):
                continue
            for todo, result in results.items():
                assert result is not None
                found.setdefault(todo, []).append(result)
    return found


def _facts(unit: WalkUnit, workers: Workers, settings: ShiftSettings) -> dict[str, Any]:
    text = unit.text
    return {
        "text": text.number,
        "domain": text.domain,
        "document": text.document,
        "digest": text.digest,
        "threads": workers.num_threads,
        "made": made_by(torch.device(settings.device)),
    }
