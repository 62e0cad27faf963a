"""Windows to be scored: each says which group the target of each of its tokens counts to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from ..window import Window

NOT_COUNTED = -1


@dataclass(frozen=True)
class Probe:
    """A window of L tokens; ``groups`` int64 (L,): the group that the *target* of each token counts
    to (a context length, a range of positions, a needle), ``-1`` to none."""

    window: Window
    groups: np.ndarray

    def __post_init__(self) -> None:
        assert self.groups.shape == (self.window.num_tokens,), "one group a token"


class ProbesOnDemand(Sequence[Probe]):
    """``count`` probes, each made anew by ``make(number)`` when it is asked for."""

    def __init__(self, count: int, make: Callable[[int], Probe]) -> None:
        self._numbers, self._make = range(count), make

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Probe: ...
    @overload
    def __getitem__(self, index: slice) -> list[Probe]: ...
    def __getitem__(self, index: int | slice) -> Probe | list[Probe]:
        if isinstance(index, slice):
            return [self._make(number) for number in self._numbers[index]]
        return self._make(self._numbers[index])


@dataclass(frozen=True)
class Excerpt:
    """Tokens that are read alone, from position 0: ``ids`` int64 (n,), BOS included.

    ``groups`` int64 (n,) of each token *as a target*, ``-1`` to none; the first token is never one.
    """

    ids: np.ndarray
    groups: np.ndarray


def packed_alone(excerpts: Iterable[Excerpt], window_tokens: int) -> list[Probe]:
    """Excerpts side by side in windows of at most ``window_tokens``, in order.

    Each computes what it does alone in any mode: it sees itself only, and its positions restart. A
    longer excerpt has a window of its own.
    """
    probes: list[Probe] = []
    batch: list[Excerpt] = []
    filled = 0
    for excerpt in excerpts:
        if batch and filled + len(excerpt.ids) > window_tokens:
            probes.append(_probe(batch))
            batch, filled = [], 0
        batch.append(excerpt)
        filled += len(excerpt.ids)
    return [*probes, _probe(batch)] if batch else probes


def _probe(excerpts: Sequence[Excerpt]) -> Probe:
    ids = np.concatenate([excerpt.ids for excerpt in excerpts])
    edges = np.cumsum([0, *(len(excerpt.ids) for excerpt in excerpts)])
    window = Window(ids, edges, mode="intra_doc_reset")
    # A target's group moves to the token that predicts it.
    groups = [np.r_[excerpt.groups[1:], NOT_COUNTED] for excerpt in excerpts]
    return Probe(window, np.concatenate(groups))
