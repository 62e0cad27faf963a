"""Means over texts of what ``diagnose shift`` stored, and the table of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

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
    """Everything measured: curves, the domains of their texts by kind, where and with what."""

    settings: ShiftSettings
    curves: list[Curve]
    domains: dict[str, list[str]]
    machines: list[str]

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
    facts = [result.facts for found in results.values() for result in found]
    machines = {
        f"{f['machine']}, {f['device']}, {f['threads']} threads, torch {f['torch']}, "
        f"transformers {f['transformers']}, {f['date']}"
        for f in facts
    }
    return ShiftSummary(settings, curves, domains, sorted(machines))


def mean_deviation(deviations: Sequence[Deviation]) -> Deviation:
    """Means, array by array; absolute values were taken within each text."""
    return Deviation(
        **{
            field.name: np.mean([getattr(d, field.name) for d in deviations], axis=0)
            for field in fields(Deviation)
        }
    )


HEADERS = (
    "weights:dtype",
    "tokens",
    "shift",
    "D signed",
    "D column",
    "D entry",
    "± of D entry",
    "unweighted, a layer",
    "first column of it",
    "mass on it",
    "logit error: first",
    "others",
)


def summary_rows(summary: ShiftSummary) -> list[tuple[object, ...]]:
    """One row a deviation, for :data:`HEADERS`.

    Eq. 4 weighted, summed over layers and heads; "unweighted, a layer" is the entry form without
    weights divided by the layers; then the first key column's share of that, the mean probability
    on that column, and eq. 5 in the entry form on it and on the others (mean over columns).
    """
    rows: list[tuple[object, ...]] = []
    for curve in summary.curves:
        errors = curve.totals("entry", "weighted")[1]
        for at, error in zip(curve.axis, errors, strict=True):
            mean = curve.mean(at)
            shift = at if curve.kind == "shift" else summary.settings.length_shift
            rows.append(
                (
                    str(curve.setting),
                    mean.num_tokens,
                    shift,
                    *(mean.total(form) for form in FORMS),
                    float(error) if np.isfinite(error) else None,  # of one text
                    mean.total("entry", "unweighted") / mean.heads.shape[2],
                    f"{mean.first_share('entry', 'unweighted'):.1%}",
                    f"{mean.mass[0]:.1%}",
                    float(mean.logits[2, 0]),
                    float(mean.logits[2, 1:].mean()),
                )
            )
    return rows


def summary_report(summary: ShiftSummary) -> dict[str, object]:
    """Everything as JSON: totals, layers, heads and binned columns of every deviation."""
    return {
        "settings": summary.settings,
        "texts": {kind: len(domains) for kind, domains in summary.domains.items()},
        "domains": summary.domains,
        "machines": summary.machines,
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
