"""One rank's error ends the run on all ranks within seconds, and is the last thing in the log.

A rank that fails writes its error into the job's store. The others learn of it in a thread, since
their main thread may wait in a collective that will never end: NCCL, unlike gloo, does not notice
a peer that is gone. A rank that is killed cannot write; its launcher ends the others then.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from ..errors import UserError
from .control import RankError

logger = logging.getLogger(__name__)

KEY = "anchorcontext/failure"
POLL_SECONDS = 2.0
GRACE_SECONDS = 8.0
"""For a peer's main thread to come to the same end by itself, before its process is ended."""
ECHO_SECONDS = 3.0
"""How long a broken connection waits for the error that broke it."""


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
    """Run the job; an error of this rank is told to the others, one of another rank ends this one.

    The process group may be made inside.

    Raises:
        RankError: another rank failed first; with its error as text.
    """
    ended = threading.Event()
    threading.Thread(target=_watch, args=(ended,), name="failure", daemon=True).start()
    try:
        yield
    except Exception as error:
        store = _store()
        if store is None:
            raise
        rank = dist.get_rank()
        first = _first_failure(store, rank, error)
        if first["rank"] != rank and not isinstance(error, RankError) and _is_echo(error):
            raise RankError(_text(first)) from None
        if rank == 0 and not isinstance(error, (UserError, RankError)):
            # The store may live in this process. The errors left out are known to all ranks.
            time.sleep(ECHO_SECONDS)
        raise
    finally:
        ended.set()


def _store() -> dist.Store | None:
    """Where the ranks meet; None before there is a group, and without other ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    # No public name gives the store of a group that somebody else may have made.
    return dist.distributed_c10d._get_default_store()


def _first_failure(store: dist.Store, rank: int, error: Exception) -> dict[str, Any]:
    """The failure that began it: another rank's, if there is one, else this one, now told."""
    deadline = time.monotonic() + (ECHO_SECONDS if _is_echo(error) else 0.0)
    mine = {"rank": rank, "error": f"{type(error).__name__}: {error}"}
    try:
        while time.monotonic() < deadline:
            told = _told(store)
            if told is not None:
                return told
            time.sleep(0.1)
        return dict(json.loads(store.compare_set(KEY, "", json.dumps(mine))))
    except RuntimeError:
        return mine  # the store is gone with the process that held it


def _told(store: dist.Store) -> dict[str, Any] | None:
    return dict(json.loads(store.get(KEY))) if store.check([KEY]) else None


def _is_echo(error: Exception) -> bool:
    """Whether an error may be nothing but a peer's end: the connection to it broke."""
    text = str(error)
    broken = ("Connection", "connection", "closed by peer", "Broken pipe", "NCCL", "Timed out")
    return isinstance(error, RuntimeError) and any(part in text for part in broken)


def _watch(ended: threading.Event) -> None:
    while not ended.wait(POLL_SECONDS):
        store = _store()
        try:
            told = None if store is None else _told(store)
        except RuntimeError:
            return  # each further question would fill the log with a stack of torch's
        if told is not None and told["rank"] != dist.get_rank():
            if not ended.wait(GRACE_SECONDS):
                logger.error("%s", _text(told))
                os._exit(1)
            return


def _text(failure: dict[str, Any]) -> str:
    return f"rank {failure['rank']} failed: {failure['error']}"
