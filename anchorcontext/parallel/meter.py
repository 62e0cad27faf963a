"""What a plan's execution cost: bytes and host seconds, counted where they arise."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Meter:
    """Counters of one rank, growing over all layers, forward and backward.

    Seconds are the host's: on a GPU, where calls return before the work is done, they tell what the
    host waited, not what the device computed.
    """

    bytes_sent: int = 0
    messages_sent: int = 0
    exchange_seconds: float = 0.0
    """Waiting for rows that had not arrived when they were needed."""
    compute_seconds: float = 0.0
    """In attention engines and merges."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block's duration as exchange."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.exchange_seconds += time.perf_counter() - start

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count the block's duration as compute."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.compute_seconds += time.perf_counter() - start
