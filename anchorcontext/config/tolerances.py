"""How far a distributed run may be from a single device. The only place with these numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerances:
    """Bounds of a parity check.

    ``logits`` bounds every absolute logit difference; ``loss`` the relative loss difference;
    ``gradient`` every gradient element g by ``gradient_floor + gradient * |g|``, and the gradient
    norm relatively.
    """

    logits: float
    loss: float
    gradient: float

    @property
    def gradient_floor(self) -> float:
        """Absolute part of the gradient bound: where g is almost 0, only rounding is left."""
        return self.gradient / 100


def default_tolerances(dtype: str) -> Tolerances:
    """The bounds for a model of ``dtype`` ("fp32" or "bf16")."""
    return _DEFAULTS[dtype]


_DEFAULTS = {
    # Both sides are exact up to the order of fp32 sums. The bounds are 10 to 100 times the
    # differences seen on tiny models and small enough that one lost target or key shows.
    "fp32": Tolerances(logits=1e-5, loss=1e-5, gradient=1e-4),
    # bf16 keeps 8 bits: logits between 16 and 32 lie on a grid of 1/8, so two correct runs whose
    # sums differ in order end up to a few grid points apart.
    "bf16": Tolerances(logits=0.5, loss=5e-3, gradient=5e-2),
}
