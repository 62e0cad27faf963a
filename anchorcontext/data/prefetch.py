"""Values of coming positions, made in one background thread while somebody else computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """``produce(position)`` ahead of time; what is asked for decides, never what was foreseen.

    ``produce`` is a function of the position alone and runs in one thread, one position after the
    other. An exception that it raises comes out of :meth:`get` of that position, with its own
    traceback; asking again tries again.
    """

    def __init__(self, produce: Callable[[int], T]) -> None:
        self._produce = produce
        self._pool: ThreadPoolExecutor | None = None
        self._pending: dict[int, Future[T]] = {}

    def get(self, position: int, following: Sequence[int]) -> T:
        """The value of ``position``; those of ``following`` are then made in the background.

        What else had been foreseen is dropped.
        """
        wanted = {position, *following}
        for other in [place for place in self._pending if place not in wanted]:
            self._pending.pop(other).cancel()
        self._submit(position)
        value = self._pending.pop(position).result()
        for place in following:
            self._submit(place)
        return value

    def close(self) -> None:
        """End the thread; waits for the value it is at."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = None
        self._pending.clear()

    def _submit(self, position: int) -> None:
        if position in self._pending:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="anchorcontext-data")
        self._pending[position] = self._pool.submit(self._produce, position)
