"""What a parity check found, judged against the tolerances; says so in rows, text and JSON."""

from __future__ import annotations

import math
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
    limit: float
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the value is finite and within the limit."""
        return math.isfinite(self.value) and self.value <= self.limit


@dataclass(frozen=True)
class GradientRow:
    """One parameter's gradient, judged."""

    difference: TensorDifference
    used: float
    """Part of the tolerance used up: passes up to 1."""

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
        """Table rows (``HEADERS``): every check, the ``worst`` parameters of each comparison."""
        rows = []
        for part in self.comparisons:
            for check in part.checks:
                rows.append(_row(part, check.quantity, check.value, check.limit, check.passed))
                rows[-1].append(check.note)
            for row in part.worst_gradients(worst):
                name = f"gradient of {row.difference.name}"
                rows.append(_row(part, name, row.used, 1.0, row.passed))
                rows[-1].append(_gradient_note(row.difference))
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
        return [Check("logits: largest difference", difference.max_abs, limit, note)]
    ours, single = to_exact
    checks = [Check("logits: largest difference", difference.max_abs, math.inf, note)]
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
    scale = abs(reference)
    error = abs(loss - reference)
    value = error / scale if scale else (0.0 if error == 0.0 else math.inf)
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
    error = abs(norm - reference)
    value = error / reference if reference else (0.0 if error == 0.0 else math.inf)
    check = Check(
        "gradient norm: relative difference",
        value,
        limits.gradient,
        f"{norm:.8g} against {reference:.8g}",
    )
    multiple = limits.multiple_of("gradient")
    if to_exact is None or multiple is None:
        allowance = limits.gradient_absolute * (reference if math.isfinite(reference) else 0.0)
        rows = [GradientRow(d, _used(d, limits.gradient, allowance)) for d in differences]
        return check, rows
    rows = []
    for difference, ours, single in zip(differences, *to_exact, strict=True):
        allowed = multiple * single.error_norm + limits.floor * single.reference_norm
        used = ours.error_norm / allowed if allowed > 0 else math.inf
        rows.append(GradientRow(difference, 0.0 if ours.error_norm == 0.0 else used))
    return check, rows


def _used(difference: TensorDifference, relative: float, allowance: float) -> float:
    """The larger of the entries' and the norm's part of the tolerance."""
    if difference.problem is not None:
        return math.inf
    allowed = relative * difference.reference_norm + allowance
    by_norm = 0.0 if difference.error_norm == 0.0 else math.inf
    if allowed > 0.0:
        by_norm = difference.error_norm / allowed
    return max(difference.violation, by_norm)


def _badness(row: GradientRow) -> float:
    failed = row.difference.problem is not None or math.isnan(row.used)
    return math.inf if failed else row.used


def _row(part: Comparison, quantity: str, value: float, limit: float, passed: bool) -> list[str]:
    limit_text = "-" if math.isinf(limit) else f"{limit:.3g}"
    return [part.baseline, quantity, f"{value:.3g}", limit_text, "ok" if passed else "FAILED"]


def _gradient_note(difference: TensorDifference) -> str:
    if difference.problem is not None:
        return difference.problem
    return (
        f"max {difference.max_abs:.3g}, norm {difference.norm:.6g} against "
        f"{difference.reference_norm:.6g}, relative {difference.relative_norm:.3g}, "
        f"cosine {difference.cosine:.8f}"
    )


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
                "used": row.used,
                "passed": row.passed,
            }
            for row in part.gradients
        ],
    }
