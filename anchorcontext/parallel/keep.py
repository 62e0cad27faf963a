"""Attention's results kept over gradient checkpointing, so that nothing is computed or sent again.

Recomputing a checkpointed layer repeats its attention and its exchange, although backward needs of
them only the output and the log-sum-exp: :func:`keep_attention` is a ``context_fn`` of
``torch.utils.checkpoint.checkpoint`` (non-reentrant) that keeps both of them from the first forward
and hands them out again in the recomputation. They live as long as the checkpoint itself: a
backward frees them layer by layer, and forwards without gradients keep nothing.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

import torch

Result = tuple[torch.Tensor, torch.Tensor]


class _Active(threading.local):
    """What the attention that runs in this thread does with its results."""

    context: _Forward | _Recomputation | None = None


# Backward recomputes in threads of autograd's own; each enters its context there.
_ACTIVE = _Active()


def keep_attention(offload: bool = False) -> tuple[AbstractContextManager, AbstractContextManager]:
    """The contexts of one checkpoint's forward and of its recomputations.

    Args:
        offload: hold what is kept in pinned host memory.
    """
    kept: list[Result] = []
    return _Forward(kept, offload), _Recomputation(kept)


def recomputed_result(q: torch.Tensor) -> Result | None:
    """Output and log-sum-exp of the attention that is recomputed in this thread, on q's device;
    None where it must be computed."""
    context = _ACTIVE.context
    return context.next(q.device) if isinstance(context, _Recomputation) else None


def keep_result(out: torch.Tensor, lse: torch.Tensor) -> None:
    """Keep what was computed, where a checkpoint asked for it."""
    context = _ACTIVE.context
    if isinstance(context, _Forward):
        context.add(out, lse)


class _Context(AbstractContextManager):
    """Active in this thread between enter and exit; contexts nest."""

    def __init__(self) -> None:
        self._outer: list[_Forward | _Recomputation | None] = []

    def __enter__(self) -> None:
        self._outer.append(_ACTIVE.context)
        _ACTIVE.context = self  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        _ACTIVE.context = self._outer.pop()


class _Forward(_Context):
    def __init__(self, kept: list[Result], offload: bool) -> None:
        super().__init__()
        self._kept, self._offload = kept, offload

    def add(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        # Detached: with its history the output would keep the graph that keeps the checkpoint.
        out, lse = out.detach(), lse.detach()
        if self._offload and out.device.type != "cpu":
            out, lse = _to_host(out), _to_host(lse)
        self._kept.append((out, lse))


class _Recomputation(_Context):
    def __init__(self, kept: list[Result]) -> None:
        super().__init__()
        self._kept, self._next = kept, 0

    def __enter__(self) -> None:
        super().__enter__()
        self._next = 0  # a graph that is retained is recomputed once more by the next backward

    def next(self, device: torch.device) -> Result:
        out, lse = self._kept[self._next]
        self._next += 1
        # A tensor of its own for each recomputation, which writes its history on it.
        return out.to(device, non_blocking=True).detach(), lse.to(device, non_blocking=True)


def _to_host(x: torch.Tensor) -> torch.Tensor:
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)
