"""Threads that each compute alone: results do not depend on how many there are.

Every operator runs on one thread, and several of them side by side. That is faster than operators
that share threads (no barrier after each, every thread keeps its own cache) and stands a busy
machine. On a GPU one worker suffices: the kernels are queued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

import torch

Task = TypeVar("Task")
Result = TypeVar("Result")


class Workers:
    """A pool of ``num_threads`` threads without gradients; a context manager.

    Denormal numbers (below 1.2e-38 in fp32) count as zero in the pool: peaked softmax rows are full
    of them, and processors handle them many times slower.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        """``num_threads``: default torch's own number."""
        self.num_threads = num_threads or torch.get_num_threads()
        self._before = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self.num_threads, initializer=_prepare_thread)

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the threads and give torch its number of threads back."""
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._before)

    def map(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """``function`` of each task, in order; at most two results a thread wait to be taken."""
        waiting: deque[Future[Result]] = deque()
        try:
            for task in tasks:
                waiting.append(self._pool.submit(function, task))
                if len(waiting) > 2 * self.num_threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _prepare_thread() -> None:
    # These settings belong to the thread that makes them.
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.set_grad_enabled(False)
