"""One attention layer, forward and backward, on P ranks: our exchanges against other packages.

All contenders (:mod:`.peer_functions`) take turns on the same window, in the same processes, in
several settings: over the loopback interface, and over networks (:mod:`.netns`) whose links are as
slow, for the FLOP rate a rank reaches here, as a cluster's are for that of its GPUs.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ..plan.mixes import mix_lengths
from ..testing import run_distributed
from ..words import counted
from .exact import exact_attention
from .netns import (
    WIRE,
    NetworkUnavailable,
    enter_port,
    private_loopback,
    throttled_network,
)
from .peer_functions import CONTENDERS, FUNCTIONS
from .peer_ranks import Job, RankResult, flops_per_second, measure


@dataclass(frozen=True)
class Setting:
    """How the ranks are joined."""

    name: str
    flops_per_byte: float | None
    """FLOPs of one rank in the time its link takes for a byte; None: loopback, not throttled."""
    target: float
    """How many times faster than the best peer we mean to be."""


# An H100 reaches about 750 bf16 TFLOP/s on large products, 500 in attention; NVLink moves 450 GB/s
# one way, a 400 Gb/s InfiniBand adapter 50 GB/s.
SETTINGS = {
    "loopback": Setting("loopback", None, 1.0),
    "nvlink": Setting("NVLink-scaled", 1.7e3, 1.2),
    "infiniband": Setting("InfiniBand-scaled", 10e3, 2.0),
}
BYTES_TARGET = 5.0
"""How many times fewer bytes than the thriftiest peer we mean to send."""

TIMEOUT_SECONDS = 1800.0
GROUP_TIMEOUT_SECONDS = 300.0
PRELOAD = (
    "anchorcontext.bench.peer_ranks",
    "deepspeed.runtime.sequence_parallel.ulysses_sp",
    "torch.distributed.tensor.experimental",
)


@dataclass(frozen=True)
class Workload:
    """The layer and the window that every contender gets."""

    window_tokens: int
    full_tokens: int
    """Mode ``full`` is measured on so many of the window's first tokens."""
    mix: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    sp: int
    repeats: int
    seed: int

    def job(self) -> Job:
        """What the ranks are told, before where they are.

        Raises:
            UserError: there is no such mix.
        """
        lengths = mix_lengths(self.mix, self.window_tokens - 1, self.seed)
        return Job(
            cu_seqlens=np.r_[0, np.cumsum(np.r_[1, lengths])],  # the anchor is a document of one
            full_tokens=min(self.full_tokens, self.window_tokens),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            seed=self.seed,
            repeats=self.repeats,
        )


@dataclass(frozen=True)
class ContenderResult:
    """One contender in one setting."""

    name: str
    function: str
    ours: bool
    unavailable: str | None
    """Why it did not run."""
    seconds: list[float]
    """A repeat: the slowest rank's forward and backward."""
    wire_bytes: float | None
    """What a rank's interface sent in a run, headers included: mean of ranks, median of repeats."""
    payload_bytes: list[int | None]
    """Ours, a rank: bytes counted in a run."""
    predicted_bytes: list[int | None]
    """Ours, a rank: bytes the plan predicts."""
    out_error: float | None
    gradient_error: float | None
    """Largest absolute difference from fp64, over dq, dk and dv; where it was measured."""

    @property
    def median_seconds(self) -> float:
        """Over the repeats."""
        return float(np.median(self.seconds))


@dataclass(frozen=True)
class SettingResult:
    """All contenders in one setting."""

    setting: Setting
    bytes_per_second: float | None
    """Of each link, each way; None: not throttled."""
    unavailable: str | None
    """Why the setting was left out."""
    results: list[ContenderResult]

    def of(self, function: str, *, ours: bool) -> list[ContenderResult]:
        """Those of ours, or of the peers, that computed ``function`` here."""
        return [
            result
            for result in self.results
            if result.function == function and result.ours == ours and result.seconds
        ]


@dataclass(frozen=True)
class PeersReport:
    """Everything ``bench peers`` found."""

    documents: int
    """In the window, the anchor included."""
    full_tokens: int
    flops_per_second: float
    """Of one rank while all compute, forward and backward of attention."""
    settings: list[SettingResult]


def bench_peers(
    workload: Workload,
    settings: Iterable[Setting] = tuple(SETTINGS.values()),
    tell: Callable[[str], None] = lambda line: None,
) -> PeersReport:
    """Measure all contenders in all settings; ``tell`` hears what goes on.

    Errors are measured in the first setting that can be made.

    Raises:
        UserError: there is no such mix.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed searches for a GPU, and warns
    job = workload.job()
    found: list[SettingResult] = []
    with tempfile.TemporaryDirectory(prefix="anchorcontext-peers-") as name:
        folder = Path(name)
        rates = run_distributed(flops_per_second, workload.sp, job, preload=PRELOAD)
        rate = float(np.median(rates))
        tell(f"a rank reaches {rate / 1e9:.1f} GFLOP/s while all {workload.sp} compute")
        exact: Path | None = _write_exact(job, folder)
        for setting in settings:
            times = counted(job.repeats, "time")
            tell(f"{setting.name}: {len(CONTENDERS)} contenders in turn, {times}")
            link = rate / setting.flops_per_byte if setting.flops_per_byte is not None else None
            here = replace(
                job,
                flops_per_second=rate,
                bytes_per_second=link or job.bytes_per_second,
                exact=exact,
            )
            try:
                results = _merge(_run(here, workload.sp, link))
            except NetworkUnavailable as reason:
                tell(f"{setting.name}: left out; {reason}")
                found.append(SettingResult(setting, link, str(reason), []))
                continue
            except (RuntimeError, TimeoutError) as failure:  # keep what the others measured
                tell(f"{setting.name}: {failure}")
                last_line = str(failure).strip().splitlines()[-1]
                found.append(SettingResult(setting, link, f"a rank failed: {last_line}", []))
                continue
            found.append(SettingResult(setting, link, None, results))
            exact = None
    return PeersReport(len(job.cu_seqlens) - 1, job.full_tokens, rate, found)


def _run(job: Job, sp: int, bytes_per_second: float | None) -> list[list[RankResult]]:
    """The job on fresh ranks, joined by links of that speed or by a loopback interface."""
    if bytes_per_second is not None:
        with throttled_network(sp, bytes_per_second) as ports:
            return _on_ranks(replace(job, interface=WIRE), sp, partial(enter_port, ports))
    with ExitStack() as stack:
        enter = None
        # Else the machine's own, whose counter also counts what other programs send.
        with suppress(NetworkUnavailable):
            enter = partial(enter_port, stack.enter_context(private_loopback(sp)))
        return _on_ranks(job, sp, enter)


def _on_ranks(job: Job, sp: int, enter: Callable[[int], None] | None) -> list[list[RankResult]]:
    return run_distributed(
        measure,
        sp,
        job,
        timeout=TIMEOUT_SECONDS,
        group_timeout=GROUP_TIMEOUT_SECONDS,
        preload=PRELOAD,
        enter=enter,
    )


def _merge(ranks: list[list[RankResult]]) -> list[ContenderResult]:
    """One result a contender from those of all ranks."""
    merged = []
    for contender, parts in zip(CONTENDERS, zip(*ranks, strict=True), strict=True):
        seconds = np.array([part.seconds for part in parts])
        wire_bytes = np.array([part.wire_bytes for part in parts])
        merged.append(
            ContenderResult(
                name=contender.name,
                function=contender.function,
                ours=contender.ours,
                unavailable=parts[0].unavailable,
                seconds=seconds.max(axis=0).tolist(),
                wire_bytes=float(np.median(wire_bytes.mean(axis=0))) if wire_bytes.size else None,
                payload_bytes=[part.payload_bytes for part in parts],
                predicted_bytes=[part.predicted_bytes for part in parts],
                out_error=_largest(part.out_error for part in parts),
                gradient_error=_largest(part.gradient_error for part in parts),
            )
        )
    return merged


def _largest(errors: Iterable[float | None]) -> float | None:
    known = [error for error in errors if error is not None]
    return max(known) if known else None


def _write_exact(job: Job, folder: Path) -> Path:
    """Write ``<function>.pt`` of every function into the folder."""
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)  # nobody else computes yet
    try:
        tensors = job.tensors()
        for function in FUNCTIONS:
            edges = job.window(function)
            q, k, v, dout = (x[: edges[-1]] for x in tensors)
            exact = exact_attention(q, k, v, dout, edges, function)
            torch.save(vars(exact), folder / f"{function}.pt")
    finally:
        torch.set_num_threads(threads)
    return folder
