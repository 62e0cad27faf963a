"""``diagnose first-token``: how much of D lies on the first key column, and why.

A column may hold much of D because much probability lies on it (a sink), or because its scores
change more than others'. Each arm of :mod:`.arms` is walked at two shifts, and for every column
three numbers are kept: its share of D (eq. 4), the change of its scores (eq. 5), and the
probability on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from ...data.tokenizer import load_tokenizer
from ...errors import UserError
from ...weights import folder_digest
from ..checks import at_least, check_reach
from ..difference import attention_differences
from ..measures import FORMS, WEIGHTS, Deviation, DeviationSum, column_bins, rows_of
from ..models import Setting, lab_model, read_config
from ..rotary import Rotary
from ..texts import Text, corpus_digest, read_texts
from ..units import Progress, Tell, Unit, UnitStore
from ..walk import Variant, walk
from ..workers import Workers
from .arms import EXCLUDED, PLAIN, Arm, Vocabulary, check_arm, make_arm

RESULT_VERSION = 2


@dataclass(frozen=True)
class FirstTokenSettings:
    """Everything that decides the numbers of ``diagnose first-token``.

    Attributes:
        model: Hugging Face model folder.
        settings: weights and dtypes, see :class:`~..models.Setting`.
        arms: see :mod:`.arms`.
        shifts: the reference's (Delta_2) and the other one's (Delta_1).
        tokens: T.
        texts, source, seed: see :func:`~..texts.read_texts`.
    """

    model: str
    settings: tuple[str, ...] = ("pretrained:bf16", "pretrained:fp32", "random:bf16")
    arms: tuple[str, ...] = (
        "plain",
        "clamped",
        "gap:256",
        "moved:100",
        "token:eos",
        "token:frequent",
        "token:random",
        "token:none",
    )
    shifts: tuple[int, int] = (16, 0)
    tokens: int = 1024
    texts: int = 2
    source: str | None = None
    seed: int = 0


@dataclass(frozen=True)
class ArmResult:
    """One arm of one setting, mean over texts; ``values`` as :func:`describe` gives them."""

    setting: str
    arm: str
    texts: int
    values: dict[str, Any]

    def spot(self, name: str = "first") -> dict[str, float]:
        """Numbers of one key column."""
        found: dict[str, float] = self.values["spots"][name]
        return found


def check_first_token_settings(settings: FirstTokenSettings) -> FirstTokenSettings:
    """The settings with names in their usual form, or why they cannot be measured.

    Raises:
        UserError: unknown settings or arms; shifts that do not differ; too few tokens.
    """
    at_least("--tokens", [settings.tokens], 4)
    at_least("--texts", [settings.texts], 1)
    if len(set(settings.shifts)) != 2 or min(settings.shifts) < 0:
        given = ",".join(map(str, settings.shifts))
        raise UserError(f"--shifts {given}: give two different ones from 0 on, as in 16,0")
    if not settings.settings or not settings.arms:
        raise UserError("--settings and --arms: give at least one each")
    vocabulary = _vocabulary(settings.model)
    arms = tuple(
        dict.fromkeys(check_arm(arm, settings.tokens, vocabulary) for arm in settings.arms)
    )
    named = tuple(str(Setting.parse(setting)) for setting in settings.settings)
    gap = max((int(arm[4:]) for arm in arms if arm.startswith("gap:")), default=0)
    check_reach(
        settings.model,
        read_config(settings.model, settings.tokens),
        settings.tokens,
        max(settings.shifts) + gap,
        fix="take fewer --tokens, or smaller --shifts and gaps",
    )
    return replace(settings, settings=named, arms=arms)


def first_token_units(settings: FirstTokenSettings) -> list[Unit]:
    """Every arm of every setting, text by text."""
    digest = folder_digest(settings.model)
    texts = corpus_digest(settings.model, settings.source)
    return [
        Unit(
            f"{setting} {arm} text {text}",
            {
                "setting": setting,
                "arm": arm,
                "text": text,
                "shifts": settings.shifts,
                "tokens": settings.tokens,
                "model": digest,
                "texts": texts,
                "seed": settings.seed,
            },
            1.5 if setting.endswith("fp32") else 1.0,
        )
        for setting in settings.settings
        for text in range(settings.texts)
        for arm in settings.arms
    ]


def run_first_token(
    settings: FirstTokenSettings, out: Path, *, workers: Workers, tell: Tell | None = None
) -> None:
    """Measure what is not yet stored; settings come from :func:`check_first_token_settings`.

    Raises:
        UserError: the model or the texts cannot be read, or ``out`` not be written.
    """
    store = UnitStore(out, "first-token", RESULT_VERSION)
    missing = store.missing(first_token_units(settings))
    if not missing:
        return
    progress = Progress(missing, tell)
    texts = _texts(settings)
    vocabulary = _vocabulary(settings.model)
    for name in settings.settings:
        wanted = [unit for unit in missing if unit.facts["setting"] == name]
        if not wanted:
            continue
        with lab_model(
            settings.model,
            Setting.parse(name),
            workers=workers,
            longest=settings.tokens,
            seed=settings.seed,
        ) as (model, rotary):
            num_layers = model.config.get_text_config().num_hidden_layers
            for unit in wanted:
                arm = make_arm(
                    unit.facts["arm"],
                    texts[unit.facts["text"]].ids,
                    shifts=settings.shifts,
                    vocabulary=vocabulary,
                    seed=settings.seed,
                )
                sums = _Sums(arm)
                for layer in sums.layers(model, rotary, workers):
                    progress.at(unit, layer / num_layers)
                store.save(unit, sums.results())
                progress.stored(unit)


def stored_arms(settings: FirstTokenSettings, out: Path) -> tuple[list[ArmResult], list[str]]:
    """Means over the stored texts, and where and with what they were measured."""
    store = UnitStore(out, "first-token", RESULT_VERSION)
    units = first_token_units(settings)
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for unit in units:
        for arm, values in (store.load(unit) or {}).items():
            found.setdefault((unit.facts["setting"], arm), []).append(values)
    results = [
        ArmResult(setting, arm, len(values), _mean(values))
        for (setting, arm), values in found.items()
    ]
    return results, store.made(units)


class _Sums:
    """The deviations of one arm; of the plain one also without its first column."""

    def __init__(self, arm: Arm) -> None:
        self.arm = arm
        tokens = len(arm.ids)
        self.parts = {arm.name: (0, DeviationSum(tokens))}
        if arm.name == PLAIN:
            self.parts[EXCLUDED] = (1, DeviationSum(tokens - 1))

    def layers(self, model: PreTrainedModel, rotary: Rotary | None, workers: Workers) -> Any:
        """Walk the arm's two forwards; gives the number of layers done after each."""
        variants = [Variant(positions, rotary=rotary) for positions in self.arm.positions]
        for states in walk(model, self.arm.ids, variants, workers=workers):
            for left_out, total in self.parts.values():
                reference, other = (a.without_first(left_out) for a in states.attention)
                total.add(attention_differences(reference, [other], workers=workers), 0, 0)
            yield states.layer + 1

    def results(self) -> dict[str, dict[str, Any]]:
        """By name, :func:`describe` of each."""
        return {
            name: describe(total.result(), self.arm.spots)
            for name, (_, total) in self.parts.items()
        }


def describe(deviation: Deviation, spots: Mapping[str, int]) -> dict[str, Any]:
    """The numbers of a deviation that this diagnosis keeps.

    ``total`` eq. 4 by form and weights; ``spots`` by name, of one column: ``share`` of D and
    ``mass`` share of all probability, both with eq. 4's weights, ``share_unweighted`` and
    ``mass_unweighted`` without, ``probability`` on it (mean over rows), ``score`` its eq. 5 in the
    entry form and ``score_ratio`` that over the mean of the other columns, ``score_share`` its
    share of the sum; ``columns``, ``scores``, ``mass`` means by bin of ``edges``; ``heads`` and
    ``first`` (layers, heads) D and what its first column adds, ``head_mass`` the probability there.
    """
    tokens = deviation.num_tokens
    edges = column_bins(tokens)
    widths = np.diff(edges)
    entry = FORMS.index("entry")
    columns, scores = deviation.columns[entry], deviation.logits[entry]

    def binned(values: np.ndarray) -> list[float]:
        return (np.add.reduceat(values, edges[:-1]) / widths).tolist()

    return {
        "tokens": tokens,
        "total": {form: {w: deviation.total(form, w) for w in WEIGHTS} for form in FORMS},
        "spots": {
            name: _spot(columns, scores, deviation.mass, rows_of(tokens), index)
            for name, index in spots.items()
            if index < tokens
        },
        "edges": edges.tolist(),
        "columns": binned(columns),
        "scores": binned(scores),
        "mass": binned(deviation.mass),
        "heads": deviation.heads[entry, 0].tolist(),
        "first": deviation.first[entry, 0].tolist(),
        "head_mass": deviation.layer_mass.tolist(),
    }


def _spot(
    columns: np.ndarray, scores: np.ndarray, mass: np.ndarray, rows: np.ndarray, index: int
) -> dict[str, float]:
    def share(values: np.ndarray) -> float:
        return float(values[index] / (values.sum() or 1.0))

    others = (scores.sum() - scores[index]) / (len(scores) - 1)
    return {
        "column": index,
        "share": share(columns),
        "share_unweighted": share(columns * rows),
        "mass": share(mass),
        "mass_unweighted": share(mass * rows),
        "probability": float(mass[index]),
        "score": float(scores[index]),
        "score_share": share(scores),
        "score_ratio": float(scores[index] / others)
        if others
        else (math.inf if scores[index] else 1.0),
    }


def _mean(values: list[dict[str, Any]]) -> dict[str, Any]:
    """Number by number, through dictionaries and lists."""
    first = values[0]
    return {
        key: _mean([value[key] for value in values])
        if isinstance(first[key], dict)
        else np.mean([value[key] for value in values], axis=0).tolist()
        for key in first
    }


def _texts(settings: FirstTokenSettings) -> list[Text]:
    # One token more than an arm has: the one without BOS begins a token later.
    return read_texts(
        settings.model,
        settings.texts,
        settings.tokens + 1,
        source=settings.source,
        seed=settings.seed,
    )


def _vocabulary(model: str) -> Vocabulary:
    tokenizer = load_tokenizer(model)
    eos = tokenizer.eos_token_id
    size = min(len(tokenizer), read_config(model, 4).get_text_config().vocab_size)
    return Vocabulary(
        size, eos if isinstance(eos, int) else None, frozenset(tokenizer.all_special_ids)
    )
