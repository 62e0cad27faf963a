"""What one training step reports.

A rank measures its own share of a step with a ``StepMeter``, which ends in a ``LocalStep``;
``gather_steps`` brings the shares of all ranks together in one collective of a few fp64 numbers;
``make_record`` turns them into the ``StepRecord`` that the sinks write.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch
import torch.distributed as dist

from ..parallel.meter import Meter, Stopwatch
from .flops import ModelShape, training_flops


@dataclass(frozen=True)
class LocalStep:
    """One rank's share of one optimiser step, summed over its micro-batches."""

    loss_sum: float = 0.0
    """Sum of the cross-entropies of this rank's targets, nats."""
    loss_tokens: int = 0
    """Number of these targets."""
    tokens: int = 0
    """Real tokens this rank holds; padding does not count."""
    attention_pairs: float = 0.0
    """Visible (query, key) pairs whose queries this rank holds, of one layer and one head."""
    bytes_sent: int = 0
    """Bytes this rank sent in attention, all layers, forward, recomputation and backward."""
    bytes_predicted: int = 0
    """What the plans said it would be."""
    seconds: float = 0.0
    """Wall-clock time of the whole step. Its parts are the device's time on a GPU, but for data."""
    seconds_data: float = 0.0
    """Waiting for windows and their plans."""
    seconds_exchange: float = 0.0
    """Waiting for keys, values and gradients to arrive in attention."""
    seconds_compute: float = 0.0
    """Forward and backward without ``seconds_exchange``; with ZeRO 2 and 3 gradients are reduced in
    it."""
    seconds_attention: float = 0.0
    """In the attention kernels: a part of ``seconds_compute``."""
    seconds_optimizer: float = 0.0
    """Gradient reduction, clipping and the parameter update."""
    peak_memory_bytes: int = 0
    """Allocated on a GPU at most in the step; on a CPU resident since the process started."""
    peak_reserved_bytes: int = 0
    """What torch's allocator held for it at most, gaps included; 0 on a CPU."""


@dataclass(frozen=True)
class StepRecord:
    """One optimiser step of the whole job. ``None`` where a value does not exist."""

    step: int
    """Optimiser steps done, this one included; the first is 1."""
    epoch: int
    loss: float | None
    """Cross-entropy per target over the whole global batch, nats."""
    perplexity: float | None
    lr: float
    grad_norm: float | None
    """Norm of the whole gradient before clipping."""
    loss_tokens: int
    tokens: int
    tokens_per_second: float
    tokens_per_second_per_rank: float
    attention_pairs: float
    attention_balance: float | None
    """The busiest rank's pairs over the mean: 1.0 is perfect balance."""
    flops: float | None
    """Of one forward and backward pass, see ``watch.flops``; recomputation is not counted."""
    mfu: float | None
    """Model FLOPs utilisation: ``flops`` over what all devices could have done in the time."""
    bytes_sent: int
    """Sum over ranks."""
    bytes_predicted: int
    """What the plans said ``bytes_sent`` would be."""
    bytes_sent_max: int
    """Of the rank that sent most."""
    peak_memory_bytes: int
    """Largest of all ranks: allocated device memory, on CPU the resident set."""
    seconds: float
    """The slowest rank's, and the sum of data, exchange, compute, optimizer and other. These are
    means over ranks."""
    seconds_data: float
    seconds_exchange: float
    seconds_compute: float
    seconds_attention: float
    """Of ``seconds_compute``."""
    seconds_optimizer: float
    seconds_other: float
    """The rest: ranks waiting for the slowest one, guards, gathering of this record."""
    seconds_checkpoint: float = 0.0
    """Training time lost to saving since the last record; not part of ``seconds``."""
    seconds_evaluation: float = 0.0
    """Training time spent on evaluation since the last record; not part of ``seconds``."""
    skipped: bool = False
    """True when the step was not applied; ``skip_reason`` says why."""
    skip_reason: str | None = None
    peak_reserved_bytes: int = 0
    """Largest of all ranks: what torch took of the device, which is more where memory is in pieces.
    CUDA and NCCL take 1 to 3 GB beside it. 0 on CPU."""
    windows: tuple[int, ...] = ()
    """The ids of the windows trained on."""

    def as_dict(self) -> dict[str, Any]:
        """The record as JSON values: numbers that are not finite become None."""
        values = asdict(self)
        values["windows"] = list(self.windows)
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }


class StepMeter:
    """Collects what one rank measures during an optimiser step.

    Losses may be given as tensors: they are summed on their device and read once, in ``finish``,
    so that no micro-batch waits for the device.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.start()

    def start(self) -> None:
        """Forget everything and start the clock of the next step."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)  # no parity check, no evaluation
        self._started = time.perf_counter()
        self._loss_sum: torch.Tensor | float = 0.0
        self._loss_tokens: torch.Tensor | int = 0
        self._counts = {"tokens": 0, "bytes_predicted": 0}
        self._attention_pairs = 0.0
        self._attention: list[Meter] = []
        self._parts = {
            "data": Stopwatch(),  # no device takes part in it
            "forward_backward": Stopwatch(self.device),
            "optimizer": Stopwatch(self.device),
        }

    def timed(
        self, part: Literal["data", "forward_backward", "optimizer"]
    ) -> AbstractContextManager[None]:
        """Count the time spent inside as ``part``: the device's, but for data."""
        return self._parts[part].running()

    def add_micro_batch(
        self,
        *,
        loss_sum: torch.Tensor | float,
        loss_tokens: torch.Tensor | int,
        tokens: int,
        attention_pairs: float = 0.0,
        attention: Meter | None = None,
    ) -> None:
        """Add one micro-batch's share; the fields are those of ``LocalStep``.

        ``attention`` is the meter of its plan, which is read in ``finish``.
        """
        if isinstance(loss_sum, torch.Tensor):
            loss_sum = loss_sum.detach().to(torch.float64)
        self._loss_sum = self._loss_sum + loss_sum
        self._loss_tokens = self._loss_tokens + loss_tokens
        self._counts["tokens"] += tokens
        self._attention_pairs += attention_pairs
        if attention is not None:
            self._attention.append(attention)

    def predict_bytes(self, count: int) -> None:
        """Note what the plans say that this rank will send."""
        self._counts["bytes_predicted"] += count

    @property
    def loss_sum(self) -> float:
        """This rank's sum so far; waits for the device."""
        return float(self._loss_sum)

    def finish(self) -> LocalStep:
        """The step's share of this rank; waits for the device. ``start`` begins the next step."""
        loss_sum, loss_tokens = float(self._loss_sum), int(self._loss_tokens)
        exchange = sum(meter.exchange.seconds for meter in self._attention)
        return LocalStep(
            loss_sum=loss_sum,
            loss_tokens=loss_tokens,
            **self._counts,
            bytes_sent=sum(meter.bytes_sent for meter in self._attention),
            attention_pairs=self._attention_pairs,
            seconds_data=self._parts["data"].seconds,
            seconds_exchange=exchange,
            seconds_compute=max(self._parts["forward_backward"].seconds - exchange, 0.0),
            seconds_attention=sum(meter.compute.seconds for meter in self._attention),
            seconds_optimizer=self._parts["optimizer"].seconds,
            peak_memory_bytes=peak_memory_bytes(self.device),
            peak_reserved_bytes=peak_reserved_bytes(self.device),
            seconds=time.perf_counter() - self._started,
        )


def gather_steps(
    local: LocalStep,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> list[LocalStep]:
    """The shares of all ranks of ``group``, in rank order, on every rank: one all-gather.

    ``device`` is where the group's backend wants its tensors. Counts travel as fp64, exact below
    2**53. Without an initialised process group the answer is this rank's share alone.
    """
    if not dist.is_available() or not dist.is_initialized():
        return [local]
    names = [field.name for field in fields(LocalStep)]
    whole = {field.name for field in fields(LocalStep) if isinstance(field.default, int)}
    mine = torch.tensor(
        [float(getattr(local, name)) for name in names], dtype=torch.float64, device=device
    )
    shares = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shares, mine, group=group)
    return [
        LocalStep(
            **{
                name: int(value) if name in whole else value
                for name, value in zip(names, share.tolist(), strict=True)
            }
        )
        for share in shares
    ]


def make_record(
    ranks: Sequence[LocalStep],
    *,
    step: int,
    lr: float,
    grad_norm: float | None,
    epoch: int = 0,
    windows: Sequence[int] = (),
    shape: ModelShape | None = None,
    peak_flops: float | None = None,
    seconds_checkpoint: float = 0.0,
    seconds_evaluation: float = 0.0,
    skip_reason: str | None = None,
) -> StepRecord:
    """The record of one step from the shares of all ranks.

    Args:
        ranks: every rank's share, in rank order.
        step: optimiser steps done, this one included.
        lr: the learning rate of this step.
        grad_norm: norm of the whole gradient before clipping.
        windows: ids of all windows of the global batch.
        shape: what the model's FLOPs depend on; without it FLOPs and MFU are None.
        peak_flops: peak FLOP/s of *one* rank's device; without it MFU is None.
        seconds_checkpoint: training time lost to saving since the last record.
        seconds_evaluation: training time spent on evaluation since the last record.
        skip_reason: why the step was not applied; None when it was.
    """
    loss_tokens = sum(rank.loss_tokens for rank in ranks)
    # The one mean that is right for uneven ranks: sum of sums over sum of counts.
    loss = sum(rank.loss_sum for rank in ranks) / loss_tokens if loss_tokens else None
    tokens = sum(rank.tokens for rank in ranks)
    pairs = sum(rank.attention_pairs for rank in ranks)
    seconds = max(rank.seconds for rank in ranks)
    flops = None if shape is None else training_flops(shape, tokens=tokens, pairs=pairs)
    mfu = None
    if flops is not None and peak_flops and seconds > 0:
        mfu = flops / (seconds * len(ranks) * peak_flops)
    tokens_per_second = tokens / seconds if seconds > 0 else 0.0
    parts = {
        part: _mean([getattr(rank, part) for rank in ranks])
        for part in ("seconds_data", "seconds_exchange", "seconds_compute", "seconds_optimizer")
    }
    return StepRecord(
        step=step,
        epoch=epoch,
        loss=loss,
        perplexity=None if loss is None else _exp(loss),
        lr=lr,
        grad_norm=grad_norm,
        loss_tokens=loss_tokens,
        tokens=tokens,
        tokens_per_second=tokens_per_second,
        tokens_per_second_per_rank=tokens_per_second / len(ranks),
        attention_pairs=pairs,
        attention_balance=(
            max(rank.attention_pairs for rank in ranks) * len(ranks) / pairs if pairs else None
        ),
        flops=flops,
        mfu=mfu,
        bytes_sent=sum(rank.bytes_sent for rank in ranks),
        bytes_predicted=sum(rank.bytes_predicted for rank in ranks),
        bytes_sent_max=max(rank.bytes_sent for rank in ranks),
        peak_memory_bytes=max(rank.peak_memory_bytes for rank in ranks),
        peak_reserved_bytes=max(rank.peak_reserved_bytes for rank in ranks),
        seconds=seconds,
        **parts,
        seconds_attention=_mean([rank.seconds_attention for rank in ranks]),
        seconds_other=seconds - sum(parts.values()),
        seconds_checkpoint=seconds_checkpoint,
        seconds_evaluation=seconds_evaluation,
        skipped=skip_reason is not None,
        skip_reason=skip_reason,
        windows=tuple(int(window) for window in windows),
    )


def peak_memory_bytes(device: torch.device | str = "cpu") -> int:
    """The most memory used: allocated on a CUDA device since the last reset (``StepMeter.start``),
    resident of this process on CPU."""
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        # VmHWM starts anew with the process; ru_maxrss is inherited through exec.
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else usage * 1024


def peak_reserved_bytes(device: torch.device | str = "cpu") -> int:
    """The most that torch's allocator held of a CUDA device since the last reset; 0 on CPU."""
    device = torch.device(device)
    return int(torch.cuda.max_memory_reserved(device)) if device.type == "cuda" else 0


def _exp(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
