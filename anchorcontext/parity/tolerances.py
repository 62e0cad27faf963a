"""How far the distributed run may be from a single device: every number, and why it is that one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Tolerances:
    """The limits of one dtype.

    fp32 runs differ only by the order of their sums, so the limits are fixed numbers. bf16 runs
    differ by roundings that a model of many layers amplifies by an amount no table can know. Where
    an fp32 run of the same weights is at hand, the distributed run may therefore be at most
    ``multiple`` times as far from it as the single-device bf16 run is; the fixed limits serve where
    there is none.
    """

    logits: float
    """Largest |a - b| allowed, times the reference's largest logit where that exceeds 1."""
    loss: float
    """|a - b| / |b| of the loss."""
    gradient: float
    """Relative limit of every entry, of every parameter's norm and of the global norm."""
    gradient_absolute: float
    """Absolute limit of every entry, times the parameter's largest entry where that exceeds 1; also
    the fraction of the norm of all gradients together by which a parameter's norm may be off."""
    multiple: float | None = None
    """Allowed error against fp32 in multiples of the single device's own error."""
    floor: float = 0.0
    """With ``multiple``: relative error always allowed, where the single device is nearly exact."""
    given: frozenset[str] = frozenset()
    """The quantities whose limits the user gave; ``multiple`` does not apply to them."""

    def multiple_of(self, quantity: str) -> float | None:
        """The multiple that applies to ``"logits"`` or ``"gradient"``; None: the fixed limit."""
        return None if quantity in self.given else self.multiple


# NUMBERS-TO-BE-MEASURED
_FP64 = Tolerances(logits=1e-10, loss=1e-10, gradient=1e-9, gradient_absolute=1e-11)
_FP32 = Tolerances(logits=1e-5, loss=1e-5, gradient=1e-4, gradient_absolute=1e-6)
_BF16 = Tolerances(
    logits=0.05, loss=2e-3, gradient=0.1, gradient_absolute=1e-3, multiple=2.0, floor=2.0**-8
)

TOLERANCES = {torch.float64: _FP64, torch.float32: _FP32, torch.bfloat16: _BF16}


def tolerances_for(
    dtype: torch.dtype,
    *,
    logits: float | None = None,
    loss: float | None = None,
    gradient: float | None = None,
) -> Tolerances:
    """The limits of ``dtype``; numbers given here (``parity.logits``, ...) replace them.

    A ``gradient`` limit keeps the table's proportion between its relative and its absolute part.
    """
    limits = TOLERANCES[dtype]
    given = {"logits": logits, "loss": loss, "gradient": gradient}
    changes = {name: value for name, value in given.items() if value is not None}
    if gradient is not None:
        proportion = limits.gradient_absolute / limits.gradient
        changes["gradient_absolute"] = gradient * proportion
    return replace(limits, given=frozenset(changes), **changes)
