"""Ranks whose launcher was killed: nobody would end them, and the next start would meet them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping

from .signals import StopSignals

POLL_SECONDS = 2.0
REASON = "end of the launcher"
_SUPERVISORS = ("TORCHELASTIC_RUN_ID", "CROSS_RANK")
"""Set by torchrun and the deepspeed launcher, which stay as parents of their ranks. Without them a
parent may well be a shell that somebody leaves."""


@contextlib.contextmanager
def stopping_without_launcher(
    stop: StopSignals, launcher: int | None = None, environ: Mapping[str, str] = os.environ
) -> Iterator[None]:
    """While entered, the end of this process's launcher asks the run to stop, as a signal does.

    ``launcher``: its process id, where that was read before imports that take long; default: the
    parent as it is now.
    """
    ended = threading.Event()
    if any(name in environ for name in _SUPERVISORS):
        arguments = (stop, os.getppid() if launcher is None else launcher, ended)
        threading.Thread(target=_watch, args=arguments, name="orphans", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _watch(stop: StopSignals, parent: int, ended: threading.Event) -> None:
    while not ended.wait(POLL_SECONDS):
        if os.getppid() != parent:
            if stop.name is None:
                stop.ask(REASON)
            return
