"""What a parity check found, judged against the tolerances; says so in rows, text and JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .compare import LogitsDifference, TensorDifference
from .tolerances import Tolerances


class ParityError(RuntimeError):
    """The distributed run does not compute what a single device would; carries the table."""

    def __init__(self, report: ParityReport) -> None:
        super().__init__(f"parity check failed\n{report.text()}")
        self.report = report


@dataclass(frozen=True)
class Check:
    """One quantity against its limit."""

    quantity: str
    value: float
    limit: float | None
    """None: shown, not judged; such a value must only be finite."""
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the value is finite and within the limit."""
        return math.isfinite(self.value) and (self.limit is None or self.value <= self.limit)


@dataclass(frozen=True)
class GradientRow:
    """One parameter's gradient, judged."""

    difference: TensorDifference
    used: float
    """Part of the tolerance used up: passes up to 1."""
    error_to_exact: float | None = None
    """Relative error of the distributed run against the fp32 run, where there is one."""
    single_error_to_exact: float | None = None
    """The same of the single device."""

    @property
    def passed(self) -> bool:
        """Whether the parameter is within tolerance."""
        return self.difference.problem is None and self.used <= 1.0


@dataclass(frozen=True)
class Comparison:
    """The distributed run against one baseline."""

    baseline: str
    num_windows: int
    num_tokens: int
    checks: list[Check] = field(default_factory=list)
    gradients: list[GradientRow] = field(default_factory=list)
    logits: LogitsDifference | None = None

    @property
    def passed(self) -> bool:
        """Whether every check and every parameter is within tolerance, and there were any."""
        verdicts = [check.passed for check in self.checks] + [row.passed for row in self.gradients]
        return bool(verdicts) and all(verdicts)

    def worst_gradients(self, count: int | None = None) -> list[GradientRow]:
        """The ``count`` parameters (all: None) that use most of their tolerance, worst first."""
        return sorted(self.gradients, key=_badness, reverse=True)[:count]


@dataclass(frozen=True)
class ParityReport:
    """All comparisons of one check; the same object on every rank."""

    title: str
    comparisons: list[Comparison]

    @property
    def passed(self) -> bool:
        """Whether every comparison passed, and there was at least one."""
        return bool(self.comparisons) and all(part.passed for part in self.comparisons)

    def raise_if_failed(self) -> None:
        """Raises ParityError, on every rank alike, when a comparison is past tolerance."""
        if not self.passed:
            raise ParityError(self)

    def rows(self, worst: int = 5) -> list[list[str]]:
        """Table rows (``HEADERS``): every check, the ``worst`` parameters of each comparison.

        A parameter's value is the part of its tolerance that is used up.
        """
        rows = []
        for part in self.comparisons:
            for check in part.checks:
                rows.append(_row(part, check.quantity, check.value, check.limit, check.passed))
                rows[-1].append(check.note)
            for row in part.worst_gradients(worst):
                name = f"gradient {row.difference.name}"
                rows.append(_row(part, name, row.used, 1.0, row.passed))
                rows[-1].append(_gradient_note(row))
        return rows

    def text(self, worst: int = 5) -> str:
        """The table as plain text, for logs and error messages."""
        table = [list(HEADERS), *self.rows(worst)]
        widths = [max(len(row[i]) for row in table) for i in range(len(HEADERS))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in table]
        return "\n".join([self.title, *(line.rstrip() for line in lines)])

    def to_dict(self) -> dict[str, Any]:
        """Everything found, as JSON types (floats may be infinite or NaN)."""
        return {
            "title": self.title,
            "passed": self.passed,
            "comparisons": [_comparison_dict(part) for part in self.comparisons],
        }


HEADERS = ("against", "quantity", "value", "limit", "", "detail")


def judge_logits(
    difference: LogitsDifference,
    limits: Tolerances,
    to_exact: tuple[LogitsDifference, LogitsDifference] | None = None,
) -> list[Check]:
    """Judge the logits.

    Args:
        difference: the distributed run against the single device.
        limits: the dtype's tolerances.
        to_exact: the distributed run, and the single device, against an fp32 run.
    """
    note = (
        f"mean {difference.mean_abs:.3g}, at {difference.where}, argmax agrees "
        f"{difference.argmax_agreement:.4%}"
    )
    if difference.num_nonfinite:
        note += f"; {difference.num_nonfinite:,} entries are not finite"
    multiple = limits.multiple_of("logits")
    if to_exact is None or multiple is None:
        limit = limits.logits * max(1.0, difference.reference_max)
        return [
            Check("logits: largest difference", difference.max_abs, limit, note),
            Check("logits: relative difference", difference.relative, limits.logits_relative),
        ]
    ours, single = to_exact
    checks = [Check("logits: largest difference", difference.max_abs, None, note)]
    for what, attribute, scale in (
        ("largest difference", "max_abs", max(1.0, single.reference_max)),
        ("worst token", "max_token_relative", 1.0),
        ("relative difference", "relative", 1.0),
    ):
        value, own = getattr(ours, attribute), getattr(single, attribute)
        limit = multiple * own + limits.floor * scale
        checks.append(Check(f"logits to fp32: {what}", value, limit, f"single device {own:.3g}"))
    return checks


def judge_loss(loss: float, reference: float, limits: Tolerances) -> Check:
    """Judge the mean loss over the targets of the global batch."""
    value = _ratio(abs(loss - reference), abs(reference))
    note = f"{loss:.8g} against {reference:.8g}"
    return Check("loss: relative difference", value, limits.loss, note)


def judge_gradients(
    differences: Sequence[TensorDifference],
    limits: Tolerances,
    to_exact: tuple[Sequence[TensorDifference], Sequence[TensorDifference]] | None = None,
) -> tuple[Check, list[GradientRow]]:
    """Judge the global gradient norm and every parameter's gradient.

    Args:
        differences: the distributed run against the single device, one a parameter.
        limits: the dtype's tolerances.
        to_exact: as ``differences``, the distributed run, and the single device, against fp32.
    """
    norm = math.hypot(*(difference.norm for difference in differences))
    reference = math.hypot(*(difference.reference_norm for difference in differences))
    value = _ratio(abs(norm - reference), reference)
    check = Check(
        "gradient norm: relative difference",
        value,
        limits.gradient_norm,
        f"{norm:.8g} against {reference:.8g}",
    )
    multiple = limits.multiple_of("gradient")
    if to_exact is None or multiple is None:
        return check, [GradientRow(d, _used(d, limits, reference)) for d in differences]
    # A vector of one large entry has one rounding error, which can happen to be tiny: no parameter
    # is held to less than what is typical.
    typical = statistics.median(single.relative_norm for single in to_exact[1])
    rows = []
    for difference, ours, single in zip(differences, *to_exact, strict=True):
        own = max(single.relative_norm, typical)
        used = _ratio(ours.relative_norm, multiple * own + limits.floor)
        errors = ours.relative_norm, single.relative_norm
        rows.append(GradientRow(difference, used, *errors))
    return check, rows


def _used(difference: TensorDifference, limits: Tolerances, global_norm: float) -> float:
    """The larger of the entries' and the norm's part of the tolerance."""
    if difference.problem is not None:
        return math.inf
    allowance = limits.gradient_absolute * (global_norm if math.isfinite(global_norm) else 0.0)
    allowed = limits.gradient * difference.reference_norm + allowance
    by_norm = _ratio(difference.error_norm, allowed)
    return max(difference.violation, by_norm) if limits.entries else by_norm


def _ratio(value: float, limit: float) -> float:
    if limit > 0.0:
        return value / limit
    return 0.0 if value == 0.0 else math.inf


def _badness(row: GradientRow) -> float:
    failed = row.difference.problem is not None or math.isnan(row.used)
    return math.inf if failed else row.used


def _row(
    part: Comparison, quantity: str, value: float, limit: float | None, passed: bool
) -> list[str]:
    limit_text = "-" if limit is None else f"{limit:.3g}"
    return [part.baseline, quantity, f"{value:.3g}", limit_text, "ok" if passed else "FAILED"]


def _gradient_note(row: GradientRow) -> str:
    found = row.difference
    if found.problem is not None:
        return found.problem
    note = f"relative {found.relative_norm:.3g}, max {found.max_abs:.3g}, cosine {found.cosine:.8f}"
    if row.error_to_exact is not None:
        note += f"; to fp32 {row.error_to_exact:.3g}, single {row.single_error_to_exact:.3g}"
    return note


def _comparison_dict(part: Comparison) -> dict[str, Any]:
    logits = None
    if part.logits is not None:
        logits = {
            "max": part.logits.max_abs,
            "mean": part.logits.mean_abs,
            "relative": part.logits.relative,
            "worst_token_relative": part.logits.max_token_relative,
            "where": None if part.logits.where is None else vars(part.logits.where),
            "argmax_agreement": part.logits.argmax_agreement,
            "num_tokens": part.logits.num_tokens,
            "num_nonfinite": part.logits.num_nonfinite,
        }
    return {
        "baseline": part.baseline,
        "passed": part.passed,
        "num_windows": part.num_windows,
        "num_tokens": part.num_tokens,
        "checks": [{**vars(check), "passed": check.passed} for check in part.checks],
        "logits": logits,
        "gradients": [
            {
                **vars(row.difference),
                "relative_norm": row.difference.relative_norm,
                "error_to_exact": row.error_to_exact,
                "single_error_to_exact": row.single_error_to_exact,
                "used": row.used,
                "passed": row.passed,
            }
            for row in part.gradients
        ],
    }
