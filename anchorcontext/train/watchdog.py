"""Tells where a step hangs: all threads' stacks, when it takes many times the median step."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

RECENT_STEPS, FEWEST_STEPS = 50, 5
SHORTEST_SECONDS = 20.0
"""A step is slow from here on only: a pause of a second says nothing about a step of 50 ms."""


class Watchdog:
    """Writes the stacks of this process into a file once in every step that takes too long.

    Args:
        factor: times the median of the recent steps; None never writes.
        file: appended to; its folder is made when it is needed.
        shortest: seconds that no step has to stay under.
    """

    def __init__(
        self, factor: float | None, file: Path, shortest: float = SHORTEST_SECONDS
    ) -> None:
        self.factor, self.file, self.shortest = factor, file, shortest
        self.fired = 0
        """Slow steps so far."""
        self._durations: deque[float] = deque(maxlen=RECENT_STEPS)
        self._deadline: float | None = None
        self._changed = threading.Condition()
        self._closed = False
        if factor is not None:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    @property
    def limit(self) -> float | None:
        """Seconds that the next step may take; None while too few are known."""
        if self.factor is None or len(self._durations) < FEWEST_STEPS:
            return None
        return max(self.shortest, self.factor * statistics.median(self._durations))

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Watch what is done inside."""
        started, limit = time.monotonic(), self.limit
        self._set(None if limit is None else started + limit)
        try:
            yield
        finally:
            self._set(None)
            self._durations.append(time.monotonic() - started)

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _set(self, deadline: float | None) -> None:
        with self._changed:
            self._deadline = deadline
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while not self._closed:
                left = None if self._deadline is None else self._deadline - time.monotonic()
                if left is None or left > 0:
                    self._changed.wait(left)
                    continue
                self._deadline = None
                self.fired += 1
                self._dump()

    def _dump(self) -> None:
        limit = self.limit
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a") as file:
                file.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}: a step over {limit:.1f} s\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            logger.warning("a step takes over %.1f s; its stacks: %s", limit, error)
        else:
            logger.warning("a step takes over %.1f s; stacks are in %s", limit, self.file)
