"""Equations 4 and 5 of the paper (arXiv 2411.13476), from a layer's column sums.

Eq. 4: the difference of two attention matrices, summed over the rows of each key column j,
weighted by 1 / (T - j), the number of queries that see column j, and summed over columns, layers
and heads. The published text does not show whether an absolute value is taken, so there are three
forms of it; of each, with the weights and without them:

======  ==========================================================================================
signed  sum over columns of the column's sum: rows of both matrices sum to one, so that without
        weights it is 0 up to rounding; with weights it tells which way mass moved
column  sum over columns of |the column's sum|
entry   sum over columns of the column's sum of |entries|: twice the moved mass of every row
======  ==========================================================================================

Eq. 5: the difference of the scores before the softmax, averaged over the T - j rows of each key
column, here for every column and not only the first. The same three forms: signed, |mean| and mean
of |entries|; they are averaged over heads and layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .difference import SUMS, LayerDifferences

FORMS = ("signed", "column", "entry")
WEIGHTS = ("weighted", "unweighted")


@dataclass(frozen=True)
class Deviation:
    """All layers of one pair of forwards over T tokens; arrays in fp64, forms in FORMS' order.

    Attributes:
        heads: (3, 2, layers, heads) eq. 4 before the sum over layers and heads; 2 is WEIGHTS.
        first: (3, 2, layers, heads) the share of it that the first key column adds.
        columns: (3, T) what each key column adds, weighted, over all layers and heads. Times
            :func:`rows_of` it is without weights.
        logits: (3, T) eq. 5, mean over layers and heads.
        layer_columns: (2, 3, layers, bins) of ``columns`` and ``logits``, by layer, in the bins of
            :func:`column_bins`: sums over heads and columns, weighted; divide by heads and by the
            columns of a bin for the mean of eq. 5.
        mass: (T,) mean probability of each key column over the rows that see it, in the reference,
            mean over layers and heads.
        layer_mass: (layers, heads) the same of the first column.
    """

    heads: np.ndarray
    first: np.ndarray
    columns: np.ndarray
    logits: np.ndarray
    layer_columns: np.ndarray
    mass: np.ndarray
    layer_mass: np.ndarray

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.columns.shape[1]

    def total(self, form: str = "entry", weights: str = "weighted") -> float:
        """Eq. 4: the sum over layers and heads."""
        return float(self.heads[FORMS.index(form), WEIGHTS.index(weights)].sum())

    def moved(self) -> float:
        """Probability that a row moves, mean over rows, layers and heads: half the entry form."""
        rows = self.heads[0, 0].size * self.num_tokens
        return self.total("entry", "unweighted") / 2 / rows

    def first_share(self, form: str = "entry", weights: str = "weighted") -> float:
        """The part of :meth:`total` that lies on the first key column; 0 where nothing differs."""
        total = self.total(form, weights)
        return float(self.first[FORMS.index(form), WEIGHTS.index(weights)].sum()) / (total or 1.0)


def rows_of(num_tokens: int) -> np.ndarray:
    """(T,) how many queries see each key column: T - j."""
    return np.arange(num_tokens, 0, -1, dtype=np.float64)


def column_bins(num_tokens: int, single: int = 32, per_octave: int = 8) -> np.ndarray:
    """Edges of bins of key columns: the first ``single`` alone, then wider ones, T last."""
    edges = list(range(min(single, num_tokens)))
    edge = float(single)
    while edge < num_tokens:
        if int(edge) > edges[-1]:
            edges.append(int(edge))
        edge *= 2 ** (1 / per_octave)
    return np.array([*edges, num_tokens])


class DeviationSum:
    """Collects the layers of one pair of forwards, one after the other."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._bins = column_bins(num_tokens)
        self._heads: list[np.ndarray] = []
        self._first: list[np.ndarray] = []
        self._binned: list[np.ndarray] = []
        self._layer_mass: list[np.ndarray] = []
        self._columns = np.zeros((3, num_tokens))
        self._logits = np.zeros((3, num_tokens))
        self._mass = np.zeros(num_tokens)

    def add(self, differences: LayerDifferences, length: int, variant: int) -> None:
        """One more layer: entry ``length`` of its lengths, entry ``variant`` of its variants."""
        assert differences.lengths[length] == self.num_tokens
        sums = differences.sums[length, variant, :, :, : self.num_tokens]
        mass = differences.mass[length, :, : self.num_tokens]
        rows = torch.from_numpy(rows_of(self.num_tokens))
        by_name = dict(zip(SUMS, sums, strict=True))
        probability = three_forms(by_name["signed"], by_name["entry"])
        logit = three_forms(by_name["logit_signed"], by_name["logit_entry"])
        both = torch.stack((probability / rows, probability), dim=1)
        self._heads.append(both.sum(-1).numpy())
        self._first.append(both[..., 0].numpy())
        columns = (probability / rows).sum(1).numpy()
        logits = (logit / rows).sum(1).numpy()
        self._columns += columns
        self._logits += logits / sums.shape[1]
        self._binned.append(np.add.reduceat((columns, logits), self._bins[:-1], axis=-1))
        self._mass += (mass / rows).mean(0).numpy()
        self._layer_mass.append((mass[:, 0] / rows[0]).numpy())

    def result(self) -> Deviation:
        """Over the layers added so far."""
        layers = len(self._heads)
        return Deviation(
            heads=np.stack(self._heads, axis=2),
            first=np.stack(self._first, axis=2),
            columns=self._columns.copy(),
            logits=self._logits / layers,
            layer_columns=np.stack(self._binned, axis=2),
            mass=self._mass / layers,
            layer_mass=np.stack(self._layer_mass),
        )


def three_forms(signed: torch.Tensor, entry: torch.Tensor) -> torch.Tensor:
    """(3, heads, T) in the order of FORMS, from column sums of differences and absolute ones."""
    return torch.stack((signed, signed.abs(), entry))
