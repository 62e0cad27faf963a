"""Signals that ask a run to stop: the first one politely, the second one at once."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from typing import Any, Self

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""What schedulers and people send; SIGUSR1 is the usual one of SLURM's ``--signal``."""

SAME_SECONDS = 1.0
"""A launcher passes on what a terminal sent to the ranks too: within this time it is one signal."""


class StopSignals:
    """While entered, the first signal sets ``name`` and a later one ends the process.

    The main thread may be inside a collective, where Python runs no signal handler, so a thread
    reads the numbers that the interpreter writes to a socket at once. Outside the main thread (a
    library's user) nothing is installed.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        """The signal, or what else asked to stop; None until there is one."""
        self._restore = contextlib.ExitStack()
        self._first = 0.0

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            handler = signal.signal(number, _noticed)
            self._restore.callback(signal.signal, number, handler)
        self._restore.callback(theirs.close)
        self._restore.callback(signal.set_wakeup_fd, before)
        threading.Thread(target=self._read, args=(ours,), name="signals", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._restore.close()

    def _read(self, numbers: socket.socket) -> None:
        with numbers:
            while received := numbers.recv(16):
                for number in received:
                    if number in STOP_SIGNALS:
                        self._receive(signal.Signals(number))

    def ask(self, name: str) -> None:
        """Ask the run to stop after the step, as the first signal does."""
        self._first = time.monotonic()
        self.name = name
        logger.warning(
            "%s: finishing the step, saving, then leaving; a signal more leaves at once", name
        )

    def _receive(self, received: signal.Signals) -> None:
        if self.name is None:
            self.ask(received.name)
        elif time.monotonic() - self._first > SAME_SECONDS:
            os.write(2, f"{received.name} again: leaving at once\n".encode())
            os._exit(128 + received)


def _noticed(number: int, frame: Any) -> None:
    """Python passes a signal on to the socket only where it has a handler of its own."""
