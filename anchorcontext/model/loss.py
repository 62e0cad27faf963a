"""Cross-entropy straight from hidden states: fp32 inside, the logits of one chunk at a time.

torch 2.13 has ``F.linear_cross_entropy``, and in fp32 it agrees with this to rounding. In bf16 it
returns, and adds up, the loss in bf16: over 16,384 tokens and 32,000 classes it gave 145,408 where
the loss is 166,773. So the sum is our own here, and torch's function is what the tests compare it
with in fp32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..modes import IGNORE


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk_tokens: int = 1024
) -> torch.Tensor:
    """Sum of ``cross_entropy(hidden @ weight.T, labels)`` over the tokens that have a target.

    Args:
        hidden: (..., D) hidden states.
        weight: (V, D) of the head, same dtype.
        labels: (...) int64 class of each token, already shifted; -100: no target.
        chunk_tokens: tokens whose logits are held at once.

    Returns:
        fp32 scalar (fp64 for fp64 inputs). Exactly 0, with zero gradients, without any target.

    Products accumulate in fp32 and logits are fp32 whatever the inputs' dtype. Both gradients are
    formed in forward, chunk by chunk, so backward only scales them and can run once.
    """
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    differentiate = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    loss = _LinearCrossEntropy.apply(hidden, weight, labels, chunk_tokens, differentiate)
    assert isinstance(loss, torch.Tensor)
    return loss


@torch.no_grad()
def token_losses(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk_tokens: int = 1024
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's cross-entropy, and whether its target is the class with the largest logit.

    Arguments as of :func:`linear_cross_entropy`, whose numerics it shares. Only tokens with a
    target are multiplied with the head. Not differentiable.

    Returns:
        (...) fp32 (fp64 for fp64 inputs), 0 without a target; (...) bool, false without one.
    """
    shape, labels = labels.shape, labels.reshape(-1)
    hidden = hidden.reshape(-1, hidden.shape[-1])
    accumulator = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    losses = torch.zeros(labels.shape, dtype=accumulator, device=hidden.device)
    hits = torch.zeros(labels.shape, dtype=torch.bool, device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        product = _Product(weight, accumulator)
        for rows in torch.nonzero(labels != IGNORE).squeeze(1).split(chunk_tokens):
            targets = labels[rows].unsqueeze(1)
            logits = product.logits(hidden[rows])
            hits[rows] = logits.argmax(dim=1) == targets[:, 0]
            losses[rows] = _softmax_in_place(logits, targets)[0][:, 0]
    return losses.view(shape), hits.view(shape)


class _LinearCrossEntropy(torch.autograd.Function):
    """hidden (N, D), weight (V, D), labels (N,) -> sum of losses, ()."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        chunk_tokens: int,
        differentiate: bool,
    ) -> torch.Tensor:
        accumulator = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        with torch.autocast(hidden.device.type, enabled=False):
            product = _Product(weight, accumulator)
            total = torch.zeros((), dtype=torch.float64, device=hidden.device)
            d_hidden = d_weight = None
            if differentiate:
                d_hidden = torch.empty(hidden.shape, dtype=accumulator, device=hidden.device)
                d_weight = torch.zeros(weight.shape, dtype=accumulator, device=hidden.device)
            for start in range(0, len(hidden), chunk_tokens):
                rows = slice(start, start + chunk_tokens)
                valid = (labels[rows] != IGNORE).unsqueeze(1)
                targets = labels[rows].unsqueeze(1).masked_fill(~valid, 0)
                # A row without a target must not matter, whatever it holds.
                x = hidden[rows].masked_fill(~valid, 0)
                losses, exps, sums = _softmax_in_place(product.logits(x), targets)
                total += losses.masked_fill(~valid, 0).sum(dtype=torch.float64)
                if d_hidden is None or d_weight is None:
                    continue
                # d logits = (exps - sums * onehot(target)) / sums, the division done on (n, D).
                exps.scatter_add_(1, targets, -sums)
                d_hidden[rows] = product.hidden(exps).div_(sums).masked_fill_(~valid, 0)
                product.add_weight_(d_weight, exps, x / sums)
        ctx.gradients = (d_hidden, d_weight)
        ctx.dtypes = (hidden.dtype, weight.dtype)
        return total.to(accumulator)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the gradients of linear_cross_entropy are used up by one backward")
        d_hidden, d_weight = ctx.gradients
        ctx.gradients = None
        # Scaled in fp32 and rounded to the parameter's dtype once.
        return (
            d_hidden.mul_(d_loss).to(ctx.dtypes[0]) if ctx.needs_input_grad[0] else None,
            d_weight.mul_(d_loss).to(ctx.dtypes[1]) if ctx.needs_input_grad[1] else None,
            None,
            None,
            None,
        )


def _softmax_in_place(
    logits: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Turn ``logits`` (n, V) into exp(logits - row maximum).

    Returns:
        each row's cross-entropy (n, 1), the exponentials, each row's sum of them (n, 1).
    """
    logits -= logits.amax(dim=1, keepdim=True)
    target_logits = logits.gather(1, targets)
    if logits.device.type == "cpu":
        # A peaked softmax is full of denormals, on which CPUs crawl: 122 s without this against
        # 10 s with it (2,048 tokens, 49,152 classes, logits of standard deviation 29). e^-61 is 0
        # against a sum of at least 1.
        logits.clamp_(min=0.7 * math.log(torch.finfo(logits.dtype).tiny))
    exps = logits.exp_()
    sums = exps.sum(dim=1, keepdim=True)
    return sums.log() - target_logits, exps, sums


class _Product:
    """The three matrix products with the head's weight (V, D), accumulated in fp32 or fp64.

    On CUDA low-precision operands are multiplied as they are into an fp32 result; CPUs round such
    a result to the operands' dtype, so there the operands are cast first.
    """

    def __init__(self, weight: torch.Tensor, accumulator: torch.dtype) -> None:
        self._accumulator = accumulator
        self._mixed = weight.dtype != accumulator and weight.device.type == "cuda"
        self._weight = weight if self._mixed else weight.to(accumulator)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x (n, D) -> (n, V)."""
        return self._multiply(x, self._weight.t())

    def hidden(self, d_logits: torch.Tensor) -> torch.Tensor:
        """d_logits (n, V) -> (n, D)."""
        return self._multiply(d_logits, self._weight)

    def add_weight_(self, d_weight: torch.Tensor, d_logits: torch.Tensor, x: torch.Tensor) -> None:
        """Add d_logits.T (V, n) @ x (n, D) into d_weight."""
        if self._mixed:
            # Added by the product itself: one of its own is as large as d_weight, 2 GB for LLaMA-3.
            a, b = d_logits.to(self._weight.dtype).t(), x.to(self._weight.dtype)
            torch.addmm(d_weight, a, b, out_dtype=self._accumulator, out=d_weight)
        else:
            d_weight.addmm_(d_logits.t(), x.to(self._accumulator))

    def _multiply(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if not self._mixed:
            return a.to(self._accumulator) @ b
        dtype = self._weight.dtype
        return torch.mm(a.to(dtype), b.to(dtype), out_dtype=self._accumulator)
