"""Differences of two runs, accumulated in chunks: logits by token, tensors (gradients) by name.

Nothing here knows about ranks or models. A value that is not finite is a difference of infinity on
whichever side it stands, also on both: two runs that break the same way have not been compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

# Elements compared at a time. Gradients: bounds the fp64 temporaries to a few tens of MB. Logits on
# a CPU: a block stays in the cache, which is five times faster.
CHUNK_ELEMENTS = 1 << 21
BLOCK_ELEMENTS = 1 << 19


@dataclass(frozen=True)
class Place:
    """One logit: window of the global batch, token of that window, entry of the vocabulary."""

    window: int
    token: int
    vocab: int

    def __str__(self) -> str:
        return f"window {self.window}, token {self.token}, vocab {self.vocab}"


@dataclass
class LogitsDifference:
    """The running difference of two streams of logits; holds statistics, never logits."""

    num_tokens: int = 0
    num_values: int = 0
    num_nonfinite: int = 0
    """Entries that are NaN or infinite on either side."""
    max_abs: float = 0.0
    where: Place | None = None
    """Where ``max_abs`` was found; the first entry that is not finite, if there is one."""
    max_token_relative: float = 0.0
    """Largest over the tokens of |a - b| / |b|, norms over the vocabulary."""
    where_relative: Place | None = None
    """The token of ``max_token_relative``; its ``vocab`` is -1."""
    reference_max: float = 0.0
    sum_abs: float = 0.0
    sum_squares: float = 0.0
    reference_squares: float = 0.0
    num_agreeing: int = 0
    """Tokens whose largest logit is the same entry on both sides."""

    @property
    def mean_abs(self) -> float:
        """Mean of |a - b| over all entries."""
        return self.sum_abs / max(self.num_values, 1)

    @property
    def relative(self) -> float:
        """Root of sum (a - b)^2 over root of sum b^2."""
        return _ratio(math.sqrt(self.sum_squares), math.sqrt(self.reference_squares))

    @property
    def argmax_agreement(self) -> float:
        """Fraction of tokens whose largest logit is the same entry on both sides."""
        return self.num_agreeing / max(self.num_tokens, 1)

    def add(
        self, window: int, tokens: torch.Tensor, logits: torch.Tensor, reference: torch.Tensor
    ) -> None:
        """Add a chunk.

        Args:
            window: number of the window in the global batch.
            tokens: (n,) int64, the tokens of that window which the rows belong to.
            logits: (n, V) floating point.
            reference: (n, V), what ``logits`` should be.

        Raises:
            ValueError: the shapes disagree.
        """
        if logits.shape != reference.shape or logits.shape[:1] != tokens.shape:
            raise ValueError(
                f"logits {tuple(logits.shape)} of {tuple(tokens.shape)} tokens against "
                f"{tuple(reference.shape)}: the shapes must be equal"
            )
        if not logits.numel():
            return
        on_cpu = logits.device.type == "cpu"
        rows = max(1, BLOCK_ELEMENTS // logits.shape[1]) if on_cpu else len(tokens)
        work = _wide(reference[:rows]).clone()
        for start in range(0, len(tokens), rows):
            block = slice(start, start + rows)
            self._add(window, tokens[block], _wide(logits[block]), _wide(reference[block]), work)

    def _add(
        self,
        window: int,
        tokens: torch.Tensor,
        logits: torch.Tensor,
        reference: torch.Tensor,
        work: torch.Tensor,
    ) -> None:
        self.num_tokens += logits.shape[0]
        self.num_values += logits.numel()
        best = reference.argmax(-1, keepdim=True)
        self.num_agreeing += int((logits.gather(1, best)[:, 0] == logits.amax(-1)).sum())
        error = torch.sub(logits, reference, out=work[: len(tokens)]).abs_()
        largest = error.amax(-1)
        if not bool(torch.isfinite(largest).all()):
            self._add_nonfinite(window, tokens, error)
            return
        row = int(largest.argmax())
        if float(largest[row]) > self.max_abs or self.where is None:
            self.max_abs = float(largest[row])
            self.where = Place(window, int(tokens[row]), int(error[row].argmax()))
        errors = torch.linalg.vector_norm(error, dim=-1).double()
        norms = torch.linalg.vector_norm(reference, dim=-1).double()
        relative = errors / norms.clamp_min(torch.finfo(torch.float64).tiny)
        row = int(relative.argmax())
        if float(relative[row]) > self.max_token_relative:
            self.max_token_relative = float(relative[row])
            self.where_relative = Place(window, int(tokens[row]), -1)
        self.reference_max = max(self.reference_max, *map(abs, map(float, reference.aminmax())))
        self.sum_abs += float(error.sum(-1).double().sum())
        self.sum_squares += float(errors.square().sum())
        self.reference_squares += float(norms.square().sum())

    def _add_nonfinite(self, window: int, tokens: torch.Tensor, error: torch.Tensor) -> None:
        bad = (~torch.isfinite(error)).nonzero()
        if not self.num_nonfinite:
            row, vocab = bad[0].tolist()
            self.where = self.where_relative = Place(window, int(tokens[row]), vocab)
        self.num_nonfinite += len(bad)
        self.max_abs = self.max_token_relative = self.sum_abs = self.sum_squares = math.inf


@dataclass(frozen=True)
class TensorDifference:
    """How one named tensor (a parameter's gradient) differs from its reference."""

    name: str
    shape: tuple[int, ...]
    problem: str | None = None
    """Why the two could not be compared, or what is not finite; None when all is well."""
    max_abs: float = math.inf
    where: tuple[int, ...] = ()
    """Index of the entry with the largest violation."""
    violation: float = math.inf
    """Largest over the entries of |a - b| / (absolute * max(1, max|b|) + relative * |b|)."""
    error_norm: float = math.inf
    """|a - b|, the 2-norm."""
    norm: float = math.nan
    reference_norm: float = math.nan
    cosine: float = math.nan
    """Cosine of the angle between a and b; 1 when both are zero."""

    @property
    def relative_norm(self) -> float:
        """|a - b| / |b|."""
        return _ratio(self.error_norm, self.reference_norm)


def compare_tensors(
    name: str,
    value: torch.Tensor | None,
    reference: torch.Tensor | None,
    *,
    relative: float,
    absolute: float,
) -> TensorDifference:
    """Compare ``value`` with ``reference`` (same shape, any floating dtype) chunk by chunk.

    Args:
        name: what the tensor is called in the report.
        value: the tensor, None when the run has none.
        reference: what it should be, None when the baseline has none.
        relative: tolerance of an entry, relative to that entry of the reference.
        absolute: tolerance of an entry in absolute terms, scaled by the reference's largest entry
            where that exceeds 1: rounding errors of sums grow with the terms, not with the sum.
    """
    if value is None or reference is None:
        there = value if reference is None else reference
        side = "the distributed run" if value is None else "the baseline"
        problem = f"missing in {side}" if there is not None else "missing on both sides"
        return TensorDifference(name, tuple(there.shape) if there is not None else (), problem)
    if value.shape != reference.shape:
        problem = f"shape {tuple(value.shape)} against {tuple(reference.shape)}"
        return TensorDifference(name, tuple(reference.shape), problem)
    sums = _Sums(relative, absolute * max(1.0, _largest(reference)))
    flat, flat_reference = value.detach().reshape(-1), reference.detach().reshape(-1)
    for start in range(0, flat.numel(), CHUNK_ELEMENTS):
        stop = start + CHUNK_ELEMENTS
        sums.add(start, flat[start:stop], flat_reference[start:stop].to(flat.device))
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(sums.worst), value.shape))
    if sums.num_nonfinite:
        problem = f"{sums.num_nonfinite:,} of {value.numel():,} entries are not finite"
        return TensorDifference(name, tuple(value.shape), problem, where=where)
    norm, reference_norm = math.sqrt(sums.squares), math.sqrt(sums.reference_squares)
    both_zero = norm == 0.0 and reference_norm == 0.0
    return TensorDifference(
        name=name,
        shape=tuple(value.shape),
        max_abs=sums.max_abs,
        where=where,
        violation=sums.violation,
        error_norm=math.sqrt(sums.error_squares),
        norm=norm,
        reference_norm=reference_norm,
        cosine=1.0 if both_zero else _ratio(sums.products, norm * reference_norm),
    )


@dataclass
class _Sums:
    """What a tensor's chunks add up to."""

    relative: float
    absolute: float
    max_abs: float = 0.0
    violation: float = 0.0
    worst: int = 0
    error_squares: float = 0.0
    squares: float = 0.0
    reference_squares: float = 0.0
    products: float = 0.0
    num_nonfinite: int = field(default=0)

    def add(self, start: int, value: torch.Tensor, reference: torch.Tensor) -> None:
        a, b = value.double(), reference.double()
        error = (a - b).abs()
        finite = torch.isfinite(error)
        if not bool(finite.all()):
            if not self.num_nonfinite:
                self.worst = start + int((~finite).nonzero()[0])
            self.num_nonfinite += int((~finite).sum())
            return
        excess = error / (self.absolute + self.relative * b.abs())
        worst = int(excess.argmax())
        if float(excess[worst]) > self.violation and not self.num_nonfinite:
            self.violation, self.worst = float(excess[worst]), start + worst
        self.max_abs = max(self.max_abs, float(error.max()))
        self.error_squares += float(error.square().sum())
        self.squares += float(a.square().sum())
        self.reference_squares += float(b.square().sum())
        self.products += float((a * b).sum())


def _largest(tensor: torch.Tensor) -> float:
    """Largest finite magnitude; 0 for an empty tensor."""
    if not tensor.numel():
        return 0.0
    largest = float(tensor.detach().abs().max())
    return largest if math.isfinite(largest) else 1.0


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """fp32 at least."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _ratio(value: float, reference: float) -> float:
    """``value / reference`` with 0/0 = 0 and x/0 = infinity."""
    if reference == 0.0:
        return 0.0 if value == 0.0 else math.inf
    return value / reference
