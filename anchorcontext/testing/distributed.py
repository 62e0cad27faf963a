"""Run a function on gloo ranks: fresh processes, a fresh group, one thread a rank.

Processes come from a fork server that has imported torch once, so starting four ranks costs
milliseconds instead of four imports. The function travels by value (cloudpickle): it may be
defined in a test module that no child process can import.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import cloudpickle

# What ranks would import one by one: 5 s of CPU each for a rank that trains, 0 after the fork.
PRELOAD = [
    "torch",
    "torch.distributed",
    "transformers.models.llama.modeling_llama",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "anchorcontext.train.loop",
]


def run_distributed(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    group_timeout: float = 20.0,
    env: dict[str, str] | None = None,
    preload: tuple[str, ...] = (),
    enter: Callable[[int], None] | None = None,
) -> list[Any]:
    """Call ``function(rank, world_size, *args)`` on ``world_size`` gloo ranks.

    Returns the ranks' results in rank order. The default process group is initialised before the
    call and destroyed after it. ``preload`` names modules that the fork server imports once (only
    the first call of a session can add some). ``enter(rank)`` is called before the group is made:
    to move the rank into a network of its own.

    Raises:
        RuntimeError: a rank raised; the message carries the first failing rank's traceback.
        TimeoutError: the ranks did not finish within ``timeout`` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *preload])
    payload = _by_value(function, (args, enter))
    with tempfile.TemporaryDirectory(prefix="anchorcontext-ranks-") as folder:
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }
        ranks = [
            context.Process(
                target=_rank_main,
                args=(rank, world_size, payload, folder, group_timeout, environment),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            _wait(ranks, folder, timeout)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()
        results = []
        for rank in range(world_size):
            with open(os.path.join(folder, f"result-{rank}"), "rb") as file:
                results.append(cloudpickle.load(file))
        return results


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _by_value(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    import sys

    module = sys.modules.get(function.__module__)
    own = module is not None and not function.__module__.startswith("anchorcontext.")
    if own:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps((function, args))
    finally:
        if own:
            cloudpickle.unregister_pickle_by_value(module)


def _wait(ranks: list[Any], folder: str, timeout: float) -> None:
    """Until all ranks succeeded; raises as soon as one failed."""
    deadline = time.monotonic() + timeout
    while any(process.is_alive() for process in ranks):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(ranks)} ranks did not finish within {timeout:g} s")
        if any(process.exitcode not in (None, 0) for process in ranks):
            break
        time.sleep(0.005)
    errors = []
    for rank in range(len(ranks)):
        path = os.path.join(folder, f"error-{rank}")
        if os.path.exists(path):
            with open(path) as file:
                stamp, text = file.read().split("\n", 1)
            errors.append((float(stamp), rank, text))
    if errors:
        _, rank, text = min(errors)
        raise RuntimeError(f"rank {rank} of {len(ranks)} failed:\n{text}")
    for rank, process in enumerate(ranks):
        process.join(timeout=5)
        if process.exitcode != 0:
            raise RuntimeError(f"rank {rank} of {len(ranks)} ended with {process.exitcode}")


def _rank_main(
    rank: int,
    world_size: int,
    payload: bytes,
    folder: str,
    group_timeout: float,
    environment: dict[str, str],
) -> None:
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # DeepSpeed collects garbage six times an engine: not among what the fork server has imported.
    gc.freeze()
    try:
        function, (args, enter) = cloudpickle.loads(payload)
        if enter is not None:
            enter(rank)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=group_timeout),
        )
        result = function(rank, world_size, *args)
        with open(os.path.join(folder, f"result-{rank}"), "wb") as file:
            cloudpickle.dump(result, file)
        dist.destroy_process_group()
    except BaseException:
        stamp = time.time()
        path = os.path.join(folder, f"error-{rank}")
        with open(path + ".part", "w") as file:
            file.write(f"{stamp}\n{traceback.format_exc()}")
        os.rename(path + ".part", path)  # the parent may look at any time
        raise SystemExit(1) from None
