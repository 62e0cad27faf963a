"""The deviation of a stack of number formats, split into the parts that its stages add, or the
frequencies of RoPE.

Two deviations x of one layer's attention, each of three quantities:

* ``exact``: the stack against fp64, at the same positions;
* ``twin``: the stack at these positions against itself with all positions shifted. In fp64 they
  agree (RoPE's scores depend on distances alone), so this is what equations 4 and 5 of the paper
  (arXiv 2411.13476) see, of one layer given one input.

Quantities: probabilities, eq. 4 in the entry form, x = sum over entries of w |difference| with w =
1 / (T - j) for key column j, summed over heads; scores, eq. 5 in the entry form, the same divided
by the number of columns and heads, so that it is a mean; outputs, |difference| over |exact|.

**Parts.** |difference| = sign(difference) difference, and the difference is a sum of what stages
add when they are switched on in order. So the sums of w sign(difference) increment split x into
parts, exactly.

**Alone.** x of each stage that rounds while all others are fp64. Independent errors add in squares:
sqrt(sum of x^2) would be the whole, over the stages that add something in order (one that rounds
what is rounded already adds nothing, though alone it does). What is missing or too much is the
**interaction**.

The same with bands of frequencies in the place of stages: a score is a sum over dimensions, so the
errors of q and k in a band's dimensions are that band's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..workers import Workers
from .stages import (
    EXACT,
    ROTATED,
    STAGES,
    Heads,
    Stack,
    output_of,
    rotate,
    scores_of,
    weights_of,
)

KINDS = ("exact", "twin")
QUANTITIES = ("probability", "score", "output")
# 128 rows x 1,024 keys in fp64 are 1 MiB; a block holds a few dozen such matrices.
BLOCK_ELEMENTS = 1 << 17
MIN_BLOCK_ROWS = 16


@dataclass(frozen=True)
class Parts:
    """The split of one stack on one layer; arrays are fp64, over KINDS, QUANTITIES and N pieces:
    STAGES, or bands.

    Attributes:
        total: (2, 3) x.
        alone: (2, 3, N) x of the stack in which that piece alone rounds.
        ordered: (2, 3, N) the parts: what the piece adds after those before it; their sum is
            ``total``.
        floor: (3,) x of fp64 itself, kind ``twin``.
    """

    total: np.ndarray
    alone: np.ndarray
    ordered: np.ndarray
    floor: np.ndarray

    @property
    def independent(self) -> np.ndarray:
        """(2, 3): what the total would be if the errors of its pieces were independent.

        Without pieces that add nothing in order: they round what is rounded already.
        """
        adding = np.where(self.ordered == 0, 0.0, self.alone)
        root: np.ndarray = np.sqrt(np.square(adding).sum(-1))
        return root

    @property
    def interaction(self) -> np.ndarray:
        """(2, 3): total minus :attr:`independent`."""
        rest: np.ndarray = self.total - self.independent
        return rest


def split(
    heads: Heads,
    stack: Stack,
    *,
    offset: int,
    shift: int,
    workers: Workers,
    only: Sequence[int] | None = None,
) -> Parts:
    """The parts of ``stack`` at positions ``offset`` .. ``offset`` + T - 1.

    Memory: a few dozen blocks of rows a worker. Values that overflow a format make the sums NaN.

    Args:
        heads: unrotated queries, keys and values.
        shift: of the twin.
        workers: heads are computed side by side.
        only: query heads; the others are left out of all sums. Default: all.
    """
    pieces: list[_Piece | None] = [None] * len(STAGES)
    for stage in stack.rounds:
        pieces[stage] = _Piece(stack.alone(stage), stack.up_to(stage))
    return _split(heads, stack, pieces, offset, shift, workers, only)


def split_bands(
    heads: Heads,
    stack: Stack,
    bands: Sequence[tuple[int, ...]],
    *,
    offset: int,
    shift: int,
    workers: Workers,
    only: Sequence[int] | None = None,
) -> Parts:
    """The parts of bands of frequencies instead of stages; arguments as of :func:`split`.

    What is split is ``stack`` up to the operands, in the dimensions of ``bands`` (indices into
    ``heads.inv_freq``, each in one band); scores and all after them are fp64.
    """
    rotation = stack.up_to(ROTATED - 1)
    up_to = [tuple(i for band in bands[: n + 1] for i in band) for n in range(len(bands))]
    pieces = [_Piece(rotation.on(a), rotation.on(b)) for a, b in zip(bands, up_to, strict=True)]
    return _split(heads, rotation.on(up_to[-1]), pieces, offset, shift, workers, only)


@dataclass(frozen=True)
class _Piece:
    """The stack in which one piece alone rounds, and the one with those before it as well."""

    alone: Stack
    up_to: Stack


def _split(
    heads: Heads,
    stack: Stack,
    pieces: Sequence[_Piece | None],
    offset: int,
    shift: int,
    workers: Workers,
    only: Sequence[int] | None,
) -> Parts:
    tasks = range(heads.num_heads) if only is None else only
    sums = np.zeros((3, 2, 3, len(pieces)))
    floor = np.zeros(3)
    norm = 0.0
    for head in workers.map(lambda h: _Head(heads, h, stack, pieces, offset, shift).sums(), tasks):
        sums += head.sums
        floor += head.floor
        norm += head.norm
    columns = heads.num_tokens * len(tasks)
    scale = np.array([1.0, 1.0 / columns, 1.0 / norm])
    sums *= scale[:, None]
    total, alone, ordered = sums
    return Parts(total[..., 0], alone, ordered, floor * scale)


@dataclass
class _Sums:
    """Of one head, before scaling: total, alone and ordered; the floor; |exact outputs|."""

    sums: np.ndarray
    floor: np.ndarray
    norm: float


class _Head:
    """One head's sums; called by the workers."""

    def __init__(
        self,
        heads: Heads,
        head: int,
        stack: Stack,
        pieces: Sequence[_Piece | None],
        offset: int,
        shift: int,
    ) -> None:
        self.heads, self.stack, self.pieces = heads, stack, pieces
        self.query = heads.query[head]
        self.key = heads.key[heads.key_head(head)]
        self.value = heads.value[heads.key_head(head)]
        positions = torch.arange(heads.num_tokens) + offset
        self.positions = (positions, positions + shift)
        self._rotated: dict[tuple[Any, ...], int] = {}
        self._different: list[tuple[torch.Tensor, torch.Tensor]] = []

    def sums(self) -> _Sums:
        """Blocks of rows, one after the other."""
        tokens = self.heads.num_tokens
        found = _Sums(np.zeros((3, 2, 3, len(self.pieces))), np.zeros(3), 0.0)
        step = min(max(BLOCK_ELEMENTS // tokens, MIN_BLOCK_ROWS), tokens)
        for start in range(0, tokens, step):
            self._add(_Block(self, slice(start, min(start + step, tokens))), found)
        return found

    def _add(self, block: _Block, found: _Sums) -> None:
        before = block.differences(EXACT)
        found.floor += before.sizes()[1]
        found.norm += float(block.results(EXACT, 0)[2].abs().sum())
        total = block.differences(self.stack)
        found.sums[0] += total.sizes()[..., None]
        signs = total.signs()
        start = before.along(signs)
        for number, piece in enumerate(self.pieces):
            if piece is None:
                continue
            found.sums[1, :, :, number] += block.differences(piece.alone).sizes()
            stop = block.differences(piece.up_to).along(signs)
            found.sums[2, :, :, number] += stop - start
            start = stop

    def rotated(self, stack: Stack, twin: int) -> int:
        """A number that stands for the rotated q and k of all tokens; equal ones share one: many a
        stage rounds what is rounded already."""
        key = (twin, stack.formats[:ROTATED], stack.frequencies)
        if key not in self._rotated:
            query, key_rows = (
                rotate(x, self.positions[twin], self.heads, stack) for x in (self.query, self.key)
            )
            for number, (q, k) in enumerate(self._different):
                if torch.equal(q, query) and torch.equal(k, key_rows):
                    self._rotated[key] = number
                    break
            else:
                self._rotated[key] = len(self._different)
                self._different.append((query, key_rows))
        return self._rotated[key]

    def query_key(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(T, D) each, of a number from :meth:`rotated`."""
        return self._different[number]


class _Block:
    """Rows of a head: scores, probabilities and outputs of stacks, each computed once."""

    def __init__(self, head: _Head, rows: slice) -> None:
        self.head, self.rows = head, rows
        seen = torch.arange(rows.stop)
        self.later = seen > torch.arange(rows.start, rows.stop)[:, None]
        tokens = head.heads.num_tokens
        self.weights = 1.0 / (tokens - seen).double()
        self._known: dict[tuple[int, tuple[str, ...]], torch.Tensor] = {}

    def results(self, stack: Stack, twin: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scores and probabilities (rows, keys) and outputs (rows, D); ``twin`` 1: shifted."""
        rotated = self.head.rotated(stack, twin)
        after = stack.formats[ROTATED:]
        scores = self._once(rotated, after[:1], lambda: self._scores(rotated, stack))
        weights = self._once(rotated, after[:3], lambda: weights_of(scores, stack))
        value = self.head.value[: self.rows.stop]
        output = self._once(
            rotated, (*after, stack["inputs"]), lambda: output_of(weights, value, stack)
        )
        return scores, weights, output

    def differences(self, stack: Stack) -> _Differences:
        """Against fp64, and against the stack's own twin."""
        own, twin, exact = self.results(stack, 0), self.results(stack, 1), self.results(EXACT, 0)
        return _Differences([self._between(own, other) for other in (exact, twin)], self.weights)

    def _between(
        self, left: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        scores, weights, output = (a - b for a, b in zip(left, right, strict=True))
        scores.masked_fill_(self.later, 0.0)  # -inf minus -inf
        return weights, scores, output

    def _scores(self, rotated: int, stack: Stack) -> torch.Tensor:
        query, key = self.head.query_key(rotated)
        scaling = self.head.heads.scaling
        return scores_of(query[self.rows], key[: self.rows.stop], self.later, scaling, stack)

    def _once(
        self, rotated: int, formats: tuple[str, ...], compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        if (rotated, formats) not in self._known:
            self._known[rotated, formats] = compute()
        return self._known[rotated, formats]


@dataclass(frozen=True)
class _Differences:
    """Of each kind: probabilities, scores (rows, keys), outputs (rows, D); weights (keys,)."""

    of: list[tuple[torch.Tensor, ...]]
    weights: torch.Tensor

    def sizes(self) -> np.ndarray:
        """(2, 3): weighted sums of absolute values; outputs are not weighted."""
        return np.array(
            [
                [float((x.abs().sum(0) * w).sum()) for x, w in zip(pair, self._scales, strict=True)]
                for pair in self.of
            ]
        )

    def signs(self) -> list[tuple[torch.Tensor, ...]]:
        """Signs, times the weights."""
        return [
            tuple(x.sign() * w for x, w in zip(pair, self._scales, strict=True)) for pair in self.of
        ]

    def along(self, signs: list[tuple[torch.Tensor, ...]]) -> np.ndarray:
        """(2, 3): sums of the products with ``signs``."""
        return np.array(
            [
                [
                    float(torch.dot(x.flatten(), sign.flatten()))
                    for x, sign in zip(*pair, strict=True)
                ]
                for pair in zip(self.of, signs, strict=True)
            ]
        )

    @property
    def _scales(self) -> tuple[torch.Tensor, ...]:
        return self.weights, self.weights, self.weights.new_ones(1)
