"""How far the distributed run may be from a single device: every number, and why it is that one.

Measured, two ranks against one device: SmolLM2-135M (30 layers, largest logit 45) on 1,024 and
2,048 tokens of source code, and the demo model on 65,536. The largest values:

==========================================  =======  =======
difference                                  fp32     bf16
==========================================  =======  =======
one logit, over the largest logit           2.2e-6   3.5e-2
logits, relative norm                       8e-7     1.2e-2
loss, relative                              6e-8     1.3e-3
norm of all gradients, relative             2.4e-7   7.5e-3
one gradient entry, over 1e-6 + 1e-4 |g|    0.39
one parameter's gradient, relative norm     8e-6     0.35
==========================================  =======  =======

Faults are larger. The smallest one tried, one target of 65,536 lost, moves the loss by 1.5e-5 and
half of the gradients by more than 1e-4. On a random model of two layers, where attention matters
least, shard-local positions move the logits by 6e-3 (relative norm) and a gradient by 0.5; an
anchor counted twice, or two documents that see each other, 0.2 and 0.3.
"""

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
    there is none, and for the loss.
    """

    logits: float
    """Largest |a - b| allowed, times the reference's largest logit where that exceeds 1."""
    logits_relative: float
    """|a - b| / |b| over all logits."""
    loss: float
    """|a - b| / |b| of the loss."""
    gradient: float
    """Relative limit of every entry and of every parameter's norm."""
    gradient_absolute: float
    """Absolute limit of every entry, times the parameter's largest entry where that exceeds 1; also
    the fraction of the norm of all gradients together by which a parameter's norm may be off."""
    gradient_norm: float
    """| |a| - |b| | / |b| of all gradients together."""
    entries: bool = True
    """Judge gradients entry by entry, too. Not in bf16: an entry that is a small sum of large terms
    is off by any factor."""
    multiple: float | None = None
    """Allowed error against fp32 in multiples of the single device's own error."""
    floor: float = 0.0
    """With ``multiple``: relative error always allowed."""
    given: frozenset[str] = frozenset()
    """The quantities whose limits the user gave; ``multiple`` does not apply to them."""

    def multiple_of(self, quantity: str) -> float | None:
        """The multiple that applies to ``"logits"`` or ``"gradient"``; None: the fixed limit."""
        return None if quantity in self.given else self.multiple


# fp64 has 29 bits more than fp32.
_FP64 = Tolerances(
    logits=1e-12,
    logits_relative=1e-12,
    loss=1e-12,
    gradient=1e-11,
    gradient_absolute=1e-13,
    gradient_norm=1e-11,
)

# What the project promises on its tiny models, whose logits and gradients stay below 1. A logit of
# 45, or an entry of a gradient that has entries of 10, has rounding errors of that size.
_FP32 = Tolerances(
    logits=1e-5,
    logits_relative=1e-5,
    loss=1e-5,
    gradient=1e-4,
    gradient_absolute=1e-6,
    gradient_norm=1e-4,
)

# multiple: the distributed and the single-device error against fp32 are draws of one distribution.
# Their ratio was 0.8 to 1.2 for logits and 0.3 to 2.0 (median 0.95) for the 272 parameters of
# SmolLM2; a gradient that is scaled, lost or not reduced was off by 10 to 40 limits.
# floor: half a unit in the last place of bf16, for what the single device computes exactly.
# The fixed limits, where no fp32 run is at hand, are two to four times what was measured.
_BF16 = Tolerances(
    logits=0.1,
    logits_relative=0.04,
    loss=5e-3,
    gradient=0.7,
    gradient_absolute=7e-3,
    gradient_norm=0.02,
    entries=False,
    multiple=3.0,
    floor=2.0**-9,
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

    What hangs together moves together, in the table's proportion: ``logits_relative`` with
    ``logits``, ``gradient_absolute`` and ``gradient_norm`` with ``gradient``.
    """
    limits = TOLERANCES[dtype]
    given = {"logits": logits, "loss": loss, "gradient": gradient}
    factors = {
        name: value / getattr(limits, name) for name, value in given.items() if value is not None
    }
    changes = {
        follower: getattr(limits, follower) * factor
        for name, factor in factors.items()
        for follower in _TOGETHER[name]
    }
    return replace(limits, given=frozenset(factors), **changes)


_TOGETHER = {
    "logits": ("logits", "logits_relative"),
    "loss": ("loss",),
    "gradient": ("gradient", "gradient_absolute", "gradient_norm"),
}
