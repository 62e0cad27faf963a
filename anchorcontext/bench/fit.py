"""Times as a sum of costs: non-negative least squares, relative to each time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Fit:
    """``seconds = sum of costs[i] * amounts[i]``."""

    costs: tuple[float, ...]
    """Seconds a unit of each amount, none negative."""
    residual: float
    """Root of the mean squared relative error."""


def fit_costs(amounts: np.ndarray, seconds: np.ndarray) -> Fit:
    """Fit the costs of amounts (m, n) to measured seconds (m,), m >= n.

    Every time counts with its relative error, so that short runs decide as much as long ones. A
    cost that would come out negative is 0, and the others are fitted without it. The last one, of
    the amount that a rate is wanted of, is positive: where noise would make it negative, another
    one is left out.
    """
    amounts, seconds = np.asarray(amounts, float), np.asarray(seconds, float)
    scaled = amounts / seconds[:, None]
    active = list(range(amounts.shape[1]))
    while True:
        found = np.linalg.lstsq(scaled[:, active], np.ones(len(seconds)), rcond=None)[0]
        others = found[:-1]
        if len(others) and found[-1] <= 0:
            active.pop(int((others * scaled[:, active[:-1]].mean(axis=0)).argmax()))
        elif len(others) and others.min() < 0:
            active.pop(int(others.argmin()))
        else:
            break
    costs = np.zeros(amounts.shape[1])
    costs[active] = found
    errors = scaled @ costs - 1
    return Fit(tuple(costs.tolist()), float(np.sqrt(np.mean(errors**2))))
