"""What a plan's execution cost: bytes counted where they arise, and seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


class Stopwatch:
    """Seconds spent in blocks of code, summed.

    On a GPU, where calls return before the work is done, they are the device's: from when the
    current stream reaches a block until it leaves it, waiting for other streams included. Nothing
    waits for the device until ``seconds`` is read.
    """

    def __init__(self, device: torch.device | str = "cpu", seconds: float = 0.0) -> None:
        self._on_gpu = torch.device(device).type == "cuda"
        self._seconds = seconds
        self._blocks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the block's duration."""
        started = _now_on_stream() if self._on_gpu else None
        start = time.perf_counter()
        try:
            yield
        finally:
            if started is None:
                self._seconds += time.perf_counter() - start
            else:
                self._blocks.append((started, _now_on_stream()))

    @property
    def seconds(self) -> float:
        """The sum so far; on a GPU the host waits until the last block is done."""
        blocks, self._blocks = self._blocks, []
        for start, end in blocks:
            end.synchronize()
            self._seconds += start.elapsed_time(end) / 1e3  # it is given in milliseconds
        return self._seconds


class Meter:
    """Counters of one rank, growing over all layers, forward and backward.

    Attributes:
        bytes_sent, messages_sent: by this rank.
        exchange: waiting for rows that had not arrived when they were needed.
        compute: in attention engines and merges.
    """

    def __init__(self) -> None:
        self.bytes_sent = 0
        self.messages_sent = 0
        self.measure_on("cpu")

    def measure_on(self, device: torch.device | str) -> None:
        """Begin to measure seconds on ``device``: before, they are the host's."""
        self.exchange, self.compute = Stopwatch(device), Stopwatch(device)

    def waiting(self) -> AbstractContextManager[None]:
        """Count the block's duration as exchange."""
        return self.exchange.running()

    def computing(self) -> AbstractContextManager[None]:
        """Count the block's duration as compute."""
        return self.compute.running()


def _now_on_stream() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
