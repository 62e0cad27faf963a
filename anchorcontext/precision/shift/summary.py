"""Means over texts of what ``diagnose shift`` stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any

import numpy as np

from ..measures import FORMS, WEIGHTS, Deviation, column_bins
from ..models import Setting
from .settings import ShiftSettings, Walk
from .store import WalkResult


@dataclass(frozen=True)
class Curve:
    """One setting's deviations, by shift or by length.

    ``of`` maps the shift (kind "shift") or the length (kind "length") to one deviation a text.
    """

    setting: Setting
    kind: str
    of: Mapping[int, Sequence[Deviation]]

    @property
    def axis(self) -> list[int]:
        """Shifts or lengths, rising."""
        return sorted(self.of)

    def mean(self, at: int) -> Deviation:
        """Mean over texts."""
        return mean_deviation(self.of[at])

    def totals(self, form: str, weights: str) -> tuple[np.ndarray, np.ndarray]:
        """Eq. 4 along the axis: mean over texts and its standard error (NaN for one text)."""
        values = np.array([[d.total(form, weights) for d in self.of[at]] for at in self.axis])
        count = values.shape[1]
        spread = values.std(1, ddof=1) if count > 1 else np.full(len(values), np.nan)
        return values.mean(1), spread / np.sqrt(count)


@dataclass(frozen=True)
class ShiftSummary:
    """Everything measured.

    Attributes:
        curves: one a walk.
        domains: by kind of walk, the domain of each text.
        made: where and with what, each once.
        seconds, processor_seconds: of all walks over one text, mean over texts; None: not known.
    """

    settings: ShiftSettings
    curves: list[Curve]
    domains: dict[str, list[str]]
    made: list[str]
    seconds: float | None = None
    processor_seconds: float | None = None

    def kind(self, kind: str) -> list[Curve]:
        """The curves against "shift" or "length"."""
        return [curve for curve in self.curves if curve.kind == kind]


def summarise(
    settings: ShiftSettings, results: Mapping[Walk, Sequence[WalkResult]]
) -> ShiftSummary:
    """The means of :func:`~.measure.stored_results`, at least one text of each walk in it."""
    curves = []
    domains = {}
    for walk, found in results.items():
        by_shift = walk.kind == "shift"
        of = {
            (shift if by_shift else length): [r.deviations[shift, length] for r in found]
            for shift, length in walk.pairs
        }
        curves.append(Curve(walk.setting, walk.kind, of))
        domains[walk.kind] = [result.facts["domain"] for result in found]
    facts = [[result.facts for result in found] for found in results.values()]
    made = {f"{f['made']}, threads: {f['threads']}" for of_walk in facts for f in of_walk}
    return ShiftSummary(
        settings,
        curves,
        domains,
        sorted(made),
        _seconds_of_text(facts, "seconds"),
        _seconds_of_text(facts, "processor_seconds"),
    )


def _seconds_of_text(facts: Sequence[Sequence[Mapping[str, Any]]], name: str) -> float | None:
    """The sum over walks, each the mean over the texts that tell; None where none of a walk do."""
    known = [[of_text[name] for of_text in of_walk if name in of_text] for of_walk in facts]
    return sum(fmean(seconds) for seconds in known) if all(known) else None


def mean_deviation(deviations: Sequence[Deviation]) -> Deviation:
    """Means, array by array; absolute values were taken within each text."""
    return Deviation(
        **{
            field.name: np.mean([getattr(d, field.name) for d in deviations], axis=0)
            for field in fields(Deviation)
        }
    )


def summary_report(summary: ShiftSummary) -> dict[str, object]:
    """For JSON: totals, layers, heads and binned columns of every deviation."""
    return {
        "texts": {kind: len(domains) for kind, domains in summary.domains.items()},
        "domains": summary.domains,
        "deviations": [
            {
                "setting": str(curve.setting),
                "kind": curve.kind,
                "shift": at if curve.kind == "shift" else summary.settings.length_shift,
                **_deviation_report(curve.mean(at)),
                "standard_error": {
                    form: {
                        weights: float(curve.totals(form, weights)[1][curve.axis.index(at)])
                        for weights in WEIGHTS
                    }
                    for form in FORMS
                },
            }
            for curve in summary.curves
            for at in curve.axis
        ],
    }


def _deviation_report(mean: Deviation) -> dict[str, object]:
    edges = column_bins(mean.num_tokens)
    widths = np.diff(edges)

    def binned(columns: np.ndarray) -> np.ndarray:
        sums: np.ndarray = np.add.reduceat(columns, edges[:-1], axis=-1)
        return sums / widths

    return {
        "tokens": mean.num_tokens,
        "total": {form: {w: mean.total(form, w) for w in WEIGHTS} for form in FORMS},
        "first_column_share": {
            form: {w: mean.first_share(form, w) for w in WEIGHTS} for form in FORMS[1:]
        },
        "layers": dict(zip(FORMS, mean.heads[:, 0].sum(-1), strict=True)),
        "heads_entry": mean.heads[2, 0],
        "column_edges": edges,
        "columns": dict(zip(FORMS, binned(mean.columns), strict=True)),
        "logits": dict(zip(FORMS, binned(mean.logits), strict=True)),
        "mass": binned(mean.mass),
    }
