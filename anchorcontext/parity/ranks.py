"""Work that rank 0 does alone while the others wait for as long as it takes.

A baseline takes many times longer than the distributed run it is compared with. Ranks that waited
for it in a barrier would hit the group's timeout, so they poll the job's store instead. They do so
for as long as rank 0 lives: the launcher ends them when it does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from typing import TypeVar

from torch.distributed.distributed_c10d import _get_default_store

from ..train.control import Control

T = TypeVar("T")

POLL_SECONDS = 0.02
_DONE = "done"
# Every rank makes the same calls in the same order, so that the counters agree.
_calls = count()


def on_rank_zero(control: Control, function: Callable[[], T], what: str) -> T | None:
    """Call ``function`` on rank 0 while the others wait, however long it takes.

    Returns its result on rank 0, None elsewhere.

    Raises:
        RuntimeError: on the other ranks, when ``function`` raised on rank 0 (which raises what
            ``function`` did); ``what`` names the work.
    """
    if control.world_size == 1:
        return function()
    store, key = _get_default_store(), f"anchorcontext/parity/{next(_calls)}"
    if control.rank == 0:
        try:
            result = function()
        except BaseException as error:
            store.set(key, f"{type(error).__name__}: {error}")
            raise
        store.set(key, _DONE)
        return result
    while not store.check([key]):
        time.sleep(POLL_SECONDS)
    message = store.get(key).decode()
    if message != _DONE:
        raise RuntimeError(f"rank 0 failed while it computed {what}: {message}")
    return None
