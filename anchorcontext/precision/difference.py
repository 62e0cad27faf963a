"""How two forwards' attention differs, summed down each key column, without an L x L matrix.

For one layer, a reference and any number of other variants: scores S = scale q.k and probabilities
P = softmax(S) are formed for a block of rows at a time, once for the reference and then for each
variant, and only column sums of differences are kept::

    signed[j]        sum over rows i >= j of  P_variant[i, j] - P_reference[i, j]
    entry[j]         sum over rows i >= j of |P_variant[i, j] - P_reference[i, j]|
    logit_signed[j]  sum over rows i >= j of  S_variant[i, j] - S_reference[i, j]
    logit_entry[j]   sum over rows i >= j of |S_variant[i, j] - S_reference[i, j]|
    mass[j]          sum over rows i >= j of  P_reference[i, j]

Which precision S and P have (``scores``): ``"fp32"`` as in FlashAttention (arXiv 2205.14135), whose
products of bf16 numbers are exact and whose sums, scale, softmax and statistics are fp32. bf16 q
and k are widened first, which changes no product, and multiplied in fp32: the same arithmetic up to
the order of the sums. ``"model"`` rounds as transformers' eager attention does: scores to the
model's dtype, again after the scale, softmax in fp32, probabilities to the model's dtype. q and k
in fp64 stay in fp64 throughout. Sums over up to 512 rows have the precision of S, sums of these are
fp64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch

from .walk import LayerAttention
from .workers import Workers

SUMS = ("signed", "entry", "logit_signed", "logit_entry")
Scores = Literal["fp32", "model"]

# 64 rows x 4,096 columns in fp32 are 1 MiB: four such buffers stay in a core's own cache.
BLOCK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}
MIN_BLOCK_ROWS, TASK_ROWS = 16, 512


@dataclass(frozen=True)
class LayerDifferences:
    """Column sums of one layer, fp64 on the CPU.

    ``sums`` (lengths, variants, 4, Hq, T), quantities in the order of :data:`SUMS`; ``mass``
    (lengths, Hq, T). Entry n of ``lengths`` counts the first ``lengths[n]`` rows alone: a causal
    model's forward of the first so many tokens. Columns from ``lengths[n]`` on are zero.
    """

    lengths: tuple[int, ...]
    sums: torch.Tensor
    mass: torch.Tensor


@dataclass(frozen=True)
class _Task:
    """Rows ``first`` to ``last`` of one head, which belong to part ``part`` of the lengths.

    ``keys``: the head's widened keys, of the reference and of every other variant.
    """

    head: int
    part: int
    first: int
    last: int
    keys: list[torch.Tensor]


def attention_differences(
    reference: LayerAttention,
    others: Sequence[LayerAttention],
    *,
    workers: Workers,
    lengths: Sequence[int] | None = None,
    scores: Scores = "fp32",
) -> LayerDifferences:
    """The sums above of one layer, every variant of ``others`` against ``reference``.

    Memory: four buffers of a block a worker, one head's widened keys, and the sums. The result does
    not depend on the number of workers.

    Args:
        reference, others: from :func:`~.walk.walk`, equal in shape.
        workers: heads and runs of rows are computed side by side.
        lengths: rising numbers of rows to report for, by default all of them.
        scores: the precision of scores and probabilities.
    """
    num_tokens, num_heads = reference.num_tokens, reference.num_heads
    cuts = tuple(lengths) if lengths is not None else (num_tokens,)
    assert list(cuts) == sorted(set(cuts)) and cuts[0] > 0 and cuts[-1] <= num_tokens
    sums = torch.zeros(len(cuts), len(others), len(SUMS), num_heads, cuts[-1], dtype=torch.float64)
    mass = torch.zeros(len(cuts), num_heads, cuts[-1], dtype=torch.float64)
    columns = _Columns(reference, others, scores)
    for task, part, part_mass in workers.map(columns, _tasks(reference, others, cuts)):
        sums[task.part, :, :, task.head, : task.last] += part
        mass[task.part, task.head, : task.last] += part_mass
    return LayerDifferences(cuts, sums.cumsum(0), mass.cumsum(0))


def attention_rows(
    attention: LayerAttention, head: int, first: int, last: int, scores: Scores = "fp32"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and probabilities of rows ``first`` to ``last`` of a head, each (rows, last).

    Scores of keys after the query are -inf.
    """
    keys = _widened_keys(attention, attention.key_head(head), last)
    head_scores = _HeadScores(attention, head, slice(first, last), keys, scores)
    s, p = head_scores.empty(last - first, last), head_scores.empty(last - first, last)
    head_scores.rows(first, s, p, _later_keys(last - first, s.device))
    return s, p


class _HeadScores:
    """Some queries and the keys of one head of one variant, widened, ready for blocks of rows."""

    def __init__(
        self,
        attention: LayerAttention,
        head: int,
        rows: slice,
        keys: torch.Tensor,
        scores: Scores,
    ) -> None:
        query = attention.query[head, rows]
        self.model_dtype = query.dtype
        self.dtype = torch.promote_types(query.dtype, torch.float32)
        self.rounds = scores == "model" and query.dtype != self.dtype
        self.scaling = attention.scaling
        self.first, self.query, self.keys = rows.start, query.to(self.dtype), keys

    def empty(self, *shape: int) -> torch.Tensor:
        return self.query.new_empty(shape)

    def rows(self, first: int, s: torch.Tensor, p: torch.Tensor, later: torch.Tensor) -> None:
        """Write scores and probabilities of the rows from ``first`` on into ``s`` and ``p``."""
        if s.dtype != self.dtype:  # they are to be compared with wider ones
            own = self.empty(2, *s.shape)
            self.rows(first, own[0], own[1], later)
            s.copy_(own[0])
            p.copy_(own[1])
            return
        num_rows, last = s.shape
        query, keys = self.query[first - self.first :][:num_rows], self.keys[:, :last]
        if self.rounds:
            torch.mm(query, keys, out=s)
            s.copy_(s.to(self.model_dtype).mul_(self.scaling))
        else:
            torch.addmm(s, query, keys, beta=0, alpha=self.scaling, out=s)
        s[:, first:].masked_fill_(later[:num_rows, :num_rows], -torch.inf)
        torch.softmax(s, -1, out=p)
        if self.rounds:
            p.copy_(p.to(self.model_dtype))


class _Columns:
    """Column sums of a task's rows; called by the workers."""

    def __init__(
        self, reference: LayerAttention, others: Sequence[LayerAttention], scores: Scores
    ) -> None:
        self.reference, self.others, self.scores = reference, others, scores

    def __call__(self, task: _Task) -> tuple[_Task, torch.Tensor, torch.Tensor]:
        """The task; (variants, 4, last) and (last,), fp64 on the CPU."""
        rows = slice(task.first, task.last)
        reference, *others = (
            _HeadScores(attention, task.head, rows, keys, self.scores)
            for attention, keys in zip((self.reference, *self.others), task.keys, strict=True)
        )
        device = reference.query.device
        limit = BLOCK_ELEMENTS.get(device.type, BLOCK_ELEMENTS["cuda"])
        step = min(max(limit // task.last, MIN_BLOCK_ROWS), task.last - task.first)
        # Sums are in the widest dtype of all variants.
        wide = max((h.dtype for h in (reference, *others)), key=lambda dtype: dtype.itemsize)
        buffers = reference.empty(4, step * task.last).to(wide)
        later = _later_keys(step, device)
        ones = buffers.new_ones(1, step)
        sums = buffers.new_zeros(len(others), len(SUMS), 1, task.last)
        mass = buffers.new_zeros(1, task.last)

        def add(into: torch.Tensor, block: torch.Tensor) -> None:
            num_rows, last = block.shape
            # A product with ones: torch's sum over rows is slower than this.
            into[:, :last].addmm_(ones[:, :num_rows], block)

        for first in range(task.first, task.last, step):
            last = min(first + step, task.last)
            num_rows = last - first
            s0, p0, s, p = (b[: num_rows * last].view(num_rows, last) for b in buffers)
            hidden = later[:num_rows, :num_rows]
            reference.rows(first, s0, p0, later)
            add(mass, p0)
            for number, other in enumerate(others):
                other.rows(first, s, p, later)
                s.sub_(s0)
                s[:, first:].masked_fill_(hidden, 0.0)  # -inf minus -inf
                for difference, signed, entry in ((p.sub_(p0), 0, 1), (s, 2, 3)):
                    add(sums[number, signed], difference)
                    add(sums[number, entry], difference.abs_())
        return task, sums[:, :, 0].double().cpu(), mass[0].double().cpu()


def _later_keys(num_rows: int, device: torch.device) -> torch.Tensor:
    """(rows, rows), true where the key comes after the query."""
    return torch.ones(num_rows, num_rows, dtype=torch.bool, device=device).triu(1)


def _widened_keys(attention: LayerAttention, key_head: int, last: int) -> torch.Tensor:
    """(D, last): transposed once, so that the product of a block of rows reads it in order."""
    keys = attention.key[key_head, :last]
    return keys.to(torch.promote_types(keys.dtype, torch.float32)).t().contiguous()


def _tasks(
    reference: LayerAttention, others: Sequence[LayerAttention], cuts: tuple[int, ...]
) -> Iterator[_Task]:
    """Runs of at most TASK_ROWS rows that cross no cut; of a head the heaviest, the last, first."""
    runs = [
        (part, first, min(first + TASK_ROWS, stop))
        for part, (start, stop) in enumerate(zip((0, *cuts[:-1]), cuts, strict=True))
        for first in range(start, stop, TASK_ROWS)
    ]
    for key_head, heads in groupby(range(reference.num_heads), reference.key_head):
        keys = [_widened_keys(a, key_head, cuts[-1]) for a in (reference, *others)]
        for head in heads:
            yield from (_Task(head, *run, keys) for run in reversed(runs))
