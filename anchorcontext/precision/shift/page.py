"""The measured section of docs/precision.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ...markdown import markdown_table
from ..measures import FORMS
from .summary import Curve, ShiftSummary


def shift_markdown(
    summary: ShiftSummary, command: str, figures: Sequence[Path], folder: Path
) -> str:
    """Tables and figures; ``figures`` are linked relative to ``folder``."""
    settings = summary.settings
    parts = [
        "## Shift invariance, measured",
        f"Written by `{command}`. Panels against {_texts(summary)}. {'; '.join(summary.machines)}.",
    ]
    by_length, by_shift = summary.kind("length"), summary.kind("shift")
    compared = f"shifts {settings.length_shift} and {settings.reference}"
    if by_length:
        parts += [
            f"**D against length**, {compared}: entry form, weighted, sum over layers and heads, "
            "mean over texts ± standard error.",
            _by_axis("tokens", by_length, "entry", "weighted"),
            "**The same without weights, divided by the layers.**",
            _by_axis("tokens", by_length, "entry", "unweighted"),
            "**Probability that moves to other keys**, of a row's 1, mean over rows, layers and "
            "heads: half of the last table over heads and tokens.",
            _moved(by_length),
            "**The first key column**, by length: its share of D in the entry form with and "
            "without weights, its share in the column form, the mean probability on it, and the "
            "mean absolute logit error (eq. 5) on it and on the other columns.",
            _first_column([c for c in by_length if c.setting in settings.settings]),
        ]
    if by_shift:
        parts += [
            f"**The three forms of D** at {settings.tokens:,} tokens, {compared}.",
            _forms(by_shift, settings.length_shift),
            f"**D against shift** at {settings.tokens:,} tokens, compared with shift "
            f"{settings.reference}: entry form, weighted.",
            _by_axis("shift", by_shift, "entry", "weighted"),
        ]
    for path in figures:
        link = path.relative_to(folder) if path.is_relative_to(folder) else path
        parts.append(f"![{path.stem.replace('-', ' ')}]({link})")
    return "\n\n".join(parts)


def _texts(summary: ShiftSummary) -> str:
    """``length: 4 texts (2 of prose, 2 of code)``, and so on."""
    parts = []
    for kind, domains in summary.domains.items():
        counts = ", ".join(f"{count} of {name}" for name, count in Counter(domains).items())
        plural = "s" if len(domains) > 1 else ""
        parts.append(f"{kind}: {len(domains)} text{plural} ({counts})")
    return "; against ".join(parts)


def _by_axis(axis: str, curves: Sequence[Curve], form: str, weights: str) -> str:
    """One row a shift or length, one column a setting."""
    values: dict[tuple[int, str], str] = {}
    for curve in curves:
        mean, error = curve.totals(form, weights)
        layers = curve.mean(curve.axis[0]).heads.shape[2] if weights == "unweighted" else 1
        for at, m, e in zip(curve.axis, mean / layers, error / layers, strict=True):
            values[at, str(curve.setting)] = f"{m:.3g}" if e != e else f"{m:.3g} ± {e:.1g}"
    names = [str(curve.setting) for curve in curves]
    rows = [
        (f"{at:,}", *(values.get((at, name), "") for name in names))
        for at in sorted({at for at, _ in values})
    ]
    return markdown_table((axis, *names), rows)


def _moved(curves: Sequence[Curve]) -> str:
    axis = sorted({at for curve in curves for at in curve.axis})
    rows = [
        (f"{at:,}", *(f"{c.mean(at).moved():.2g}" if at in c.of else "" for c in curves))
        for at in axis
    ]
    return markdown_table(("tokens", *(str(curve.setting) for curve in curves)), rows)


def _first_column(curves: Sequence[Curve]) -> str:
    rows = []
    for curve in curves:
        for at in curve.axis:
            mean = curve.mean(at)
            rows.append(
                (
                    str(curve.setting),
                    f"{at:,}",
                    f"{mean.first_share('entry'):.1%}",
                    f"{mean.first_share('entry', 'unweighted'):.1%}",
                    f"{mean.first_share('column'):.1%}",
                    f"{mean.mass[0]:.1%}",
                    f"{mean.logits[2, 0]:.3g}",
                    f"{mean.logits[2, 1:].mean():.3g}",
                )
            )
    headers = (
        "setting",
        "tokens",
        "share, weighted",
        "unweighted",
        "column form",
        "probability",
        "logit error on it",
        "on others",
    )
    return markdown_table(headers, rows)


def _forms(curves: Sequence[Curve], shift: int) -> str:
    rows = []
    for curve in curves:
        if shift not in curve.axis:
            continue
        mean = curve.mean(shift)
        rows.append(
            (
                str(curve.setting),
                *(f"{mean.total(form, 'weighted'):.3g}" for form in FORMS),
                *(f"{mean.total(form, 'unweighted'):.3g}" for form in FORMS),
            )
        )
    headers = ("setting", *FORMS, *(f"{form}, unweighted" for form in FORMS))
    return markdown_table(headers, rows)
