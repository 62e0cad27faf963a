"""One job at a time in a run folder: two would write into each other's checkpoints."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
from pathlib import Path

from ..errors import UserError, writing

logger = logging.getLogger(__name__)

FILE = "lock"
WAIT_SECONDS = 120.0
"""For the ranks of the start before: they may still be saving, or their node may have failed, and
a network file system gives its locks up only after a minute or two."""
RETRY_SECONDS = 1.0


class RunLock:
    """Held by rank 0 while it lives; the system releases it however that process ends.

    A record lock (``lockf``): it reaches over NFS, and is one of the process, not of the file
    handle. On a file system without locks there is none, and the log says so.

    Raises:
        UserError: another process still trains in ``run_dir`` after ``WAIT_SECONDS``.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / FILE
        with writing("run.output_dir", run_dir.parent):
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+")
        self._wait()
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._file.flush()

    def close(self) -> None:
        """Let another job have the folder."""
        self._file.close()

    def _wait(self) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        told = False
        while not self._taken():
            self._file.seek(0)
            holder = self._file.read() or "another process"
            if time.monotonic() > deadline:
                raise UserError(
                    f"{self.path.parent}: {holder} is training in this folder; stop it, or give "
                    "this run another run.name"
                )
            if not told:
                logger.warning(
                    "%s: %s is training in this folder; waiting for its end, %.0f s at most",
                    *(self.path.parent, holder, WAIT_SECONDS),
                )
                told = True
            time.sleep(RETRY_SECONDS)

    def _taken(self) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError as error:
            logger.warning(
                "%s cannot be locked (%s): nothing keeps a second job out", self.path, error
            )
        return True
