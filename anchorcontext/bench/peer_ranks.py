"""What every rank of ``bench peers`` runs: each contender in turn, timed, counted and checked."""

from __future__ import annotations

import ctypes
import signal
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from ..errors import UserError
from ..parallel import distributed_attention, make_plan
from ..plan import CostModel
from ..window import Window
from .netns import LOOPBACK, bytes_sent
from .peer_functions import CONTENDERS, FULL, PADDING, Case, Contender, Prepared

LOOPBACK_BYTES_PER_SECOND = 1e9
SECONDS_PER_MESSAGE = 2e-4
"""Of gloo over TCP, and the rate of its loopback: an order of magnitude is all a plan needs."""
WARM_UPS = 2
"""On a tiny window: connections are made, and TorchScript compiles at the second call."""
WARM_UP_TOKENS = 256
FLOPS_PER_PAIR = 14
"""Times head dimension and query heads: 4 forward, 10 backward (FlashAttention's count)."""
FLOPS_TOKENS = 2048
FLOPS_REPEATS = 5

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Job:
    """What to measure; the same on all ranks."""

    cu_seqlens: np.ndarray
    """int64 (n + 1,): edges of the documents of the whole window."""
    full_tokens: int
    """Mode ``full`` is measured on so many of the window's first tokens."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    seed: int
    repeats: int
    flops_per_second: float = 1e10
    """What a rank reaches, and ..."""
    bytes_per_second: float = LOOPBACK_BYTES_PER_SECOND
    """... what its link moves each way: known to our planner."""
    exact: Path | None = None
    """Folder of the exact results, ``<function>.pt``; None: errors are not measured."""
    interface: str = LOOPBACK
    """What the ranks speak over."""

    def window(self, function: str) -> np.ndarray:
        """int64 (n + 1,): edges of the documents that ``function`` is measured on."""
        if function != FULL:
            return self.cu_seqlens
        edges = self.cu_seqlens[self.cu_seqlens < self.full_tokens]
        return np.r_[edges, self.full_tokens]

    def cost(self) -> CostModel:
        """The costs of the layer: attention alone, without the products around it."""
        return CostModel.of_layer(
            linear_weights=0.0,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            element_size=self.dtype.itemsize,
            gradient_size=max(4, self.dtype.itemsize),
            flops_per_second=self.flops_per_second,
            bytes_per_second=self.bytes_per_second,
            seconds_per_message=SECONDS_PER_MESSAGE,
        )

    def tensors(self) -> Tensors:
        """q, k, v and the output's gradient of the whole window, token-major."""
        generator = torch.Generator().manual_seed(self.seed)
        q, k, v, dout = (
            torch.randn(int(self.cu_seqlens[-1]), heads, self.head_dim, generator=generator)
            for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads, self.num_heads)
        )
        return q.to(self.dtype), k.to(self.dtype), v.to(self.dtype), dout.to(self.dtype)


@dataclass
class RankResult:
    """One contender on one rank."""

    contender: str
    function: str
    unavailable: str | None = None
    """Why it did not run."""
    seconds: list[float] = field(default_factory=list)
    """A repeat: from the common start to this rank's end."""
    wire_bytes: list[int] = field(default_factory=list)
    """A repeat: what the rank's interface sent; over loopback the share of one rank of it."""
    payload_bytes: int | None = None
    """Ours: a run's bytes as the meter counted them."""
    predicted_bytes: int | None = None
    """Ours: the same as the plan predicts them."""
    out_error: float | None = None
    gradient_error: float | None = None
    """Largest absolute difference from the exact results, over dq, dk and dv."""


def measure(rank: int, world_size: int, job: Job) -> list[RankResult]:
    """Run the job on this rank: every contender, in their order."""
    _end_with_parent()
    # The peers call functions of torch that have new names.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    whole = job.tensors()
    results = [RankResult(contender.name, contender.function) for contender in CONTENDERS]
    runs: list[tuple[RankResult, _Run]] = []
    for contender, result in zip(CONTENDERS, results, strict=True):
        try:
            run = _Run.warm(contender, job, whole)
        except (UserError, ValueError, ImportError) as error:
            result.unavailable = str(error)
            continue
        runs.append((result, run))
        plan = run.prepared.plan
        if plan is not None:
            result.predicted_bytes = plan.predicted_bytes(
                num_layers=1,
                num_heads=job.num_heads,
                num_kv_heads=job.num_kv_heads,
                head_dim=job.head_dim,
                dtype=job.dtype,
            )
    for repeat in range(job.repeats):
        for result, run in runs:
            run.measure(result, job.interface, job.exact if repeat == 0 else None)
    return results


def flops_per_second(rank: int, world_size: int, job: Job) -> float:
    """What this rank reaches in causal attention, forward and backward, while all compute."""
    length = min(FLOPS_TOKENS, int(job.cu_seqlens[-1]))
    plan = make_plan(Window(np.zeros(length, dtype=np.int64), [0, length], FULL))
    q, k, v, dout = (x[:length].transpose(0, 1)[None] for x in job.tensors())
    seconds = []
    for _ in range(FLOPS_REPEATS):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        dist.barrier()
        start = time.perf_counter()
        distributed_attention(leaves[0], leaves[1], leaves[2], plan).backward(dout)
        seconds.append(time.perf_counter() - start)
    flops = FLOPS_PER_PAIR * job.head_dim * job.num_heads * plan.num_pairs
    return flops / float(np.median(seconds))


@dataclass(frozen=True)
class _Run:
    """A contender on a window of which this rank takes its rows anew for every run."""

    prepared: Prepared
    function: str
    whole: Tensors

    @classmethod
    def warm(cls, contender: Contender, job: Job, whole: Tensors) -> _Run:
        """The contender on the job's window, after some runs on its first few tokens."""
        window = job.window(contender.function)

        def prepared(cu_seqlens: np.ndarray) -> _Run:
            assert dist.group.WORLD is not None
            case = Case(
                cu_seqlens=cu_seqlens,
                num_heads=job.num_heads,
                num_kv_heads=job.num_kv_heads,
                head_dim=job.head_dim,
                dtype=job.dtype,
                cost=job.cost(),
                group=dist.group.WORLD,
            )
            return cls(contender.prepare(case), contender.function, whole)

        few = prepared(np.unique(window.clip(max=WARM_UP_TOKENS)))
        for _ in range(WARM_UPS):
            _attend(few.prepared, few.local())
        return prepared(window)

    def local(self) -> Tensors:
        """q, k, v (leaves) and dout: (1, H, S, D), views of token-major memory as a model's are."""
        rows = torch.from_numpy(self.prepared.rows)
        padding = (rows == PADDING)[:, None, None]
        q, k, v, dout = (
            x.index_select(0, rows.clamp(min=0)).masked_fill_(padding, 0).transpose(0, 1)[None]
            for x in self.whole
        )
        return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout

    def measure(self, result: RankResult, interface: str, exact: Path | None) -> None:
        """One timed run, compared with the exact results if they are given.

        The interface's counter is read while nobody sends.
        """
        tensors = self.local()
        plan = self.prepared.plan
        payload = plan.meter.bytes_sent if plan is not None else 0
        dist.barrier()
        sent = bytes_sent(interface)
        dist.barrier()
        start = time.perf_counter()
        out = _attend(self.prepared, tensors)
        result.seconds.append(time.perf_counter() - start)
        dist.barrier()
        sent = bytes_sent(interface) - sent
        dist.barrier()
        # All ranks share the loopback interface, whose counter is theirs together.
        result.wire_bytes.append(sent // (dist.get_world_size() if interface == LOOPBACK else 1))
        if plan is not None:
            result.payload_bytes = plan.meter.bytes_sent - payload
        if exact is not None:
            result.out_error, result.gradient_error = self._errors(out, tensors, exact)

    def _errors(self, out: torch.Tensor, tensors: Tensors, folder: Path) -> tuple[float, float]:
        """Largest absolute differences from the exact results: of out, and over dq, dk, dv."""
        exact = torch.load(folder / f"{self.function}.pt", mmap=True)
        real = torch.from_numpy(np.flatnonzero(self.prepared.rows != PADDING))
        tokens = torch.from_numpy(self.prepared.rows)[real]

        def error(name: str, found: torch.Tensor | None) -> float:
            assert found is not None
            expected = exact[name].index_select(0, tokens)
            rows = found[0].transpose(0, 1).index_select(0, real)
            return float((rows.double() - expected).abs().max()) if len(real) else 0.0

        gradients = [error(f"d{n}", x.grad) for n, x in zip("qkv", tensors[:3], strict=True)]
        return error("out", out), max(gradients)


def _attend(prepared: Prepared, tensors: Tensors) -> torch.Tensor:
    """Forward and backward."""
    q, k, v, dout = tensors
    out = prepared.attend(q, k, v)
    out.backward(dout)
    return out.detach()


def _end_with_parent() -> None:
    """Have the kernel end this process with the one that forked it, however that one ends."""
    set_death_signal = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(set_death_signal, signal.SIGKILL)
