"""Jobs of several ranks that stay alive and take turns, each a process group of its own.

Two jobs that are compared must not compute at the same time, and must not be measured minutes
apart either: each waits, asleep, until it is told to do its next piece of work.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from ..errors import UserError
from ..testing.distributed import PRELOAD, free_port
from ..train.launch import tell_deepspeed_the_accelerator


class Job:
    """``world_size`` ranks, as a launcher would start them, each with an object that works.

    Args:
        make_worker: called once on every rank, with ``arguments``; what it returns is called with
            the argument of every :meth:`run`. Importable by name.
        world_size: ranks.
        threads: CPU threads of each of them.
    """

    def __init__(
        self, make_worker: Callable[..., Any], world_size: int, threads: int, *arguments: Any
    ) -> None:
        tell_deepspeed_the_accelerator()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        port = free_port()
        self._pipes: list[Connection] = []
        self._ranks = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": str(threads),
            }
            process = context.Process(
                target=_serve,
                args=(theirs, variables, threads, make_worker, arguments),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._ranks.append(process)

    def run(self, argument: Any) -> list[Any]:
        """Have every rank do one piece of work; their results in the order of ranks.

        Raises:
            UserError: as a rank raised it.
            RuntimeError: a rank failed otherwise, with its traceback.
        """
        for pipe in self._pipes:
            pipe.send(argument)
        return [self._answer(rank, pipe) for rank, pipe in enumerate(self._pipes)]

    def close(self) -> None:
        """End the ranks."""
        for process in self._ranks:
            process.kill()
            process.join()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _answer(self, rank: int, pipe: Connection) -> Any:
        try:
            failed, answer = pipe.recv()
        except EOFError:
            raise RuntimeError(f"rank {rank} of {len(self._pipes)} ended") from None
        if isinstance(failed, UserError):
            raise failed
        if failed:
            raise RuntimeError(f"rank {rank} of {len(self._pipes)} failed:\n{failed}")
        return answer


def _serve(
    pipe: Connection,
    variables: dict[str, str],
    threads: int,
    make_worker: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """A rank's life: build the worker, answer until the parent ends."""
    os.environ.update(variables)
    import torch

    torch.set_num_threads(threads)
    try:
        worker = make_worker(*arguments)
        while True:
            pipe.send((None, worker(pipe.recv())))
    except EOFError:
        return
    except UserError as error:
        pipe.send((error, None))
    except Exception:
        pipe.send((traceback.format_exc(), None))
