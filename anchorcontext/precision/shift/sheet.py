"""Tables and readings of ``diagnose shift``.

Readings state what the numbers say; the thresholds they use are constants of :mod:`..sheet`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ...words import counted
from ..measures import FORMS, WEIGHTS
from ..models import Setting
from ..sheet import CLEAR, LARGER, STANDS_OUT, Sheet, Table, trend
from .summary import Curve, ShiftSummary


def shift_sheet(summary: ShiftSummary, *, command: str) -> Sheet:
    """Everything that was measured."""
    settings = asdict(summary.settings)
    for name in ("settings", "beside"):
        settings[name] = [str(setting) for setting in getattr(summary.settings, name)]
    return Sheet(
        name="shift",
        title="Shift invariance",
        command=command,
        made=[*summary.made, *_cost(summary)],
        settings=settings,
        readings=shift_readings(summary),
        tables=[table for table in _tables(summary) if table.rows],
    )


def _cost(summary: ShiftSummary) -> list[str]:
    known = [
        f"{seconds / 60:.3g} min {of}"
        for seconds, of in (
            (summary.seconds, "on the clock"),
            (summary.processor_seconds, "of processor time"),
        )
        if seconds is not None
    ]
    return [f"a text took {', '.join(known)}"] if known else []


def shift_readings(summary: ShiftSummary) -> list[str]:
    """What the curves say."""
    return [
        *_dtypes(summary.curves),
        *_lengths(summary.kind("length")),
        *_shifts(summary.kind("shift")),
        *_first(summary.kind("length") or summary.kind("shift")),
    ]


def _dtypes(curves: Sequence[Curve]) -> list[str]:
    """Each narrower dtype against fp32 with the same weights, at the last place both have."""
    readings = []
    for kind in ("length", "shift"):
        by_setting = {str(c.setting): c for c in curves if c.kind == kind}
        for curve in by_setting.values():
            wide = by_setting.get(f"{curve.setting.weights}:fp32")
            if wide is None or curve.setting.dtype in ("fp32", "fp64"):
                continue
            at = max(set(curve.axis) & set(wide.axis), default=None)
            if at is None or not wide.mean(at).total():
                continue
            ratio = curve.mean(at).total() / wide.mean(at).total()
            more = "so the dtype does it" if ratio >= CLEAR else "so it is not the dtype"
            place = f"{at:,} tokens" if kind == "length" else f"a shift of {at:,}"
            readings.append(
                f"{curve.setting}: at {place} D is {ratio:.3g} times that of fp32, {more}."
            )
    return readings


def _lengths(curves: Sequence[Curve]) -> list[str]:
    readings = []
    for curve in curves:
        first, last = curve.axis[0], curve.axis[-1]
        start, stop = curve.mean(first).total(), curve.mean(last).total()
        if first == last or not start:
            continue
        readings.append(
            f"{curve.setting}: from {first:,} to {last:,} tokens D {trend(stop / start)}, the "
            f"length {last / first:.3g} times."
        )
    return readings


def _shifts(curves: Sequence[Curve]) -> list[str]:
    readings = []
    for curve in curves:
        values = {at: curve.mean(at).total() for at in curve.axis if curve.mean(at).total()}
        if len(values) < 2:
            continue
        least, most = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
        ratio = values[most] / values[least]
        size = (
            f"depends on the shift: {values[least]:.3g} at {least:,} to {values[most]:.3g} at "
            f"{most:,}"
            if ratio >= CLEAR
            else f"hardly depends on the shift (a factor of {ratio:.2f} between all of them)"
        )
        readings.append(f"{curve.setting}: D {size}.")
    return readings


def _first(curves: Sequence[Curve]) -> list[str]:
    readings = []
    for curve in curves:
        at = curve.axis[-1] if curve.kind == "length" else curve.axis[0]
        mean = curve.mean(at)
        if not mean.total() or mean.num_tokens < 2:
            continue
        share, mass = mean.first_share(), mean.mass[0] / mean.mass.sum()
        others = mean.logits[2, 1:].mean()
        error = mean.logits[2, 0] / others if others else float("inf")
        due = STANDS_OUT / mean.num_tokens
        if share < due:
            cause = f"less than {STANDS_OUT:g} equal shares"
        else:
            large = [
                *([f"its probability is over {STANDS_OUT:g} equal shares"] if mass >= due else []),
                *(["its logit error is large"] if error >= LARGER else []),
            ]
            cause = " and ".join(large) or "neither probability nor logit error stand out"
        readings.append(
            f"{curve.setting}, {mean.num_tokens:,} tokens: the first key column holds "
            f"{_percent(share)} of D and, with the same weights, {_percent(mass)} of the "
            f"probability; its logit error is {error:.2f} times that of the others: {cause}."
        )
        if curve.kind == "length" and curve.mean(curve.axis[0]).total():
            before = curve.mean(curve.axis[0]).first_share()
            if before and len(curve.axis) > 1:
                readings.append(
                    f"{curve.setting}: from {curve.axis[0]:,} to {at:,} tokens that share "
                    f"{trend(share / before)} ({_percent(before)} to {_percent(share)})."
                )
    return readings


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else f"{100 * share:.1g}%"


def _tables(summary: ShiftSummary) -> list[Table]:
    settings = summary.settings
    by_length, by_shift = summary.kind("length"), summary.kind("shift")
    compared = f"shifts {settings.length_shift:,} and {settings.reference:,}"
    tables = []
    if by_length:
        tables += [
            Table(
                f"D against length, {_texts(summary, 'length')}, {compared}: eq. 4, entry form, "
                "weighted, sum over layers and heads, mean over texts ± standard error.",
                *_by_axis(by_length, lambda c: _totals(c, "weighted")),
            ),
            Table(
                "The same without weights, divided by the layers.",
                *_by_axis(by_length, lambda c: _totals(c, "unweighted")),
            ),
            Table(
                "Probability that moves to other keys, of a row's 1, mean over rows, layers and "
                "heads: half of the last table over heads and tokens.",
                *_by_axis(by_length, lambda c: [f"{c.mean(at).moved():.2g}" for at in c.axis]),
            ),
        ]
    tables.append(_first_column(by_length or by_shift, settings.settings))
    if by_shift:
        where = f"at {settings.tokens:,} tokens, {_texts(summary, 'shift')}"
        tables += [
            _forms(by_shift, settings.length_shift, f"The three forms of D {where}, {compared}."),
            Table(
                f"D against shift {where}, compared with shift {settings.reference:,}: entry form, "
                "weighted.",
                *_by_axis(by_shift, lambda c: _totals(c, "weighted")),
            ),
        ]
    return tables


def _texts(summary: ShiftSummary, kind: str) -> str:
    """What a panel stands on: ``2 of 50 texts (1 of prose, 1 of code)``."""
    domains, wanted = summary.domains[kind], summary.settings.texts
    counts = ", ".join(f"{count} of {name}" for name, count in Counter(domains).items())
    part = f"{len(domains)} of " if len(domains) < wanted else ""
    return f"{part}{counted(wanted, 'text')} ({counts})"


def _by_axis(
    curves: Sequence[Curve], cells: Callable[[Curve], list[str]]
) -> tuple[list[str], list[list[Any]]]:
    """Headers, and one row a shift or length, one column a setting."""
    columns = [dict(zip(curve.axis, cells(curve), strict=True)) for curve in curves]
    headers = [_axis_name(curves), *(str(curve.setting) for curve in curves)]
    axis = sorted({at for column in columns for at in column})
    return headers, [[at, *(column.get(at) for column in columns)] for at in axis]


def _axis_name(curves: Sequence[Curve]) -> str:
    return "tokens" if curves[0].kind == "length" else "shift"


def _totals(curve: Curve, weights: str) -> list[str]:
    """D, entry form, with its standard error where there are texts enough; unweighted, a layer."""
    mean, error = curve.totals("entry", weights)
    layers = curve.mean(curve.axis[0]).heads.shape[2] if weights == "unweighted" else 1
    return [
        f"{m:.3g}" if np.isnan(e) else f"{m:.3g} ± {e:.1g}"
        for m, e in zip(mean / layers, error / layers, strict=True)
    ]


def _first_column(curves: Sequence[Curve], shown: Sequence[Setting]) -> Table:
    rows: list[list[Any]] = []
    for curve in curves:
        for at in curve.axis if curve.setting in shown else ():
            mean = curve.mean(at)
            rows.append(
                [
                    str(curve.setting),
                    at,
                    f"{mean.first_share('entry'):.1%}",
                    f"{mean.first_share('entry', 'unweighted'):.1%}",
                    f"{mean.first_share('column'):.1%}",
                    f"{mean.mass[0]:.1%}",
                    float(mean.logits[2, 0]),
                    float(mean.logits[2, 1:].mean()),
                ]
            )
    return Table(
        "The first key column: its share of D in the entry form with and without weights, its "
        "share in the column form, the mean probability on it, and the mean absolute logit error "
        "(eq. 5) on it and on the other columns.",
        [
            "setting",
            _axis_name(curves),
            "share, weighted",
            "unweighted",
            "column form",
            "probability",
            "logit error on it",
            "on others",
        ],
        rows,
    )


def _forms(curves: Sequence[Curve], shift: int, title: str) -> Table:
    headers = ["setting", *FORMS, *(f"{form}, unweighted" for form in FORMS)]
    rows: list[list[Any]] = [
        [str(c.setting), *(c.mean(shift).total(form, w) for w in WEIGHTS for form in FORMS)]
        for c in curves
        if shift in c.axis
    ]
    return Table(title, headers, rows)
