"""``diagnose shift`` as a sheet: its table, and readings made from the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from ..sheet import CLEAR, LARGER, STANDS_OUT, Sheet, Table, trend
from .summary import HEADERS, Curve, ShiftSummary, summary_rows


def shift_sheet(summary: ShiftSummary, command: str, figures: Sequence[str]) -> Sheet:
    """``figures``: names under OUT/figures."""
    return Sheet(
        name="shift",
        title="Shift invariance",
        command=command,
        made=summary.machines,
        settings=asdict(summary.settings),
        readings=shift_readings(summary),
        tables=[
            Table(
                "D (eq. 4), weighted, sum over layers and heads, mean over texts; the entry form "
                "without weights, divided by layers; the first key column's share of that; mean "
                "probability on it; mean absolute logit error (eq. 5) on it and on the others.",
                list(HEADERS),
                [list(row) for row in summary_rows(summary)],
            )
        ],
        figures={name: name.replace("-", " ") for name in figures},
    )


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
                *(["its probability is large"] if mass >= due else []),
                *(["its logit error is large"] if error >= LARGER else []),
            ]
            cause = " and ".join(large) or "neither probability nor logit error stand out"
        readings.append(
            f"{curve.setting}, {mean.num_tokens:,} tokens: the first key column holds {share:.1%} "
            f"of D and {mass:.1%} of the probability, its logit error is {error:.2f} times that of "
            f"the others: {cause}."
        )
        if curve.kind == "length" and curve.mean(curve.axis[0]).total():
            before = curve.mean(curve.axis[0]).first_share()
            if before and len(curve.axis) > 1:
                readings.append(
                    f"{curve.setting}: from {curve.axis[0]:,} to {at:,} tokens that share "
                    f"{trend(share / before)} ({before:.1%} to {share:.1%})."
                )
    return readings
