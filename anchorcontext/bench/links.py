"""What a link between ranks does: bytes a second each way, and seconds a message.

Every rank sends to a neighbour and receives from another one at the same time, as in the exchange
of rows; a message of n bytes takes ``seconds_per_message + n / bytes_per_second``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from .fit import Fit, fit_costs

SIZES = (1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 24)
"""Bytes of the messages."""


@dataclass(frozen=True)
class Link:
    """One kind of link, fitted to messages of several sizes."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    """Of the slowest rank, the fastest repeat."""
    fit: Fit

    @property
    def seconds_per_message(self) -> float:
        """What a message costs beyond its bytes."""
        return self.fit.costs[0]

    @property
    def bytes_per_second(self) -> float:
        """Of one device, each way."""
        return 1 / self.fit.costs[1]


def measure_link(
    shift: int, device: torch.device, sizes: Sequence[int] = SIZES, repeats: int = 5
) -> Link:
    """Time messages from every rank r to rank r + ``shift``; collective over all ranks.

    The same result on every rank.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    seconds = []
    for size in sizes:
        out, into = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
        times = []
        for _ in range(repeats + 1):  # the first one opens the connection
            dist.barrier()
            started = time.perf_counter()
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, out, (rank + shift) % world),
                    dist.P2POp(dist.irecv, into, (rank - shift) % world),
                ]
            )
            for work in works:
                work.wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - started)
        slowest = torch.tensor(times[1:], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        seconds.append(float(slowest.min()))
    amounts = np.stack([np.ones(len(sizes)), np.asarray(sizes, float)], axis=1)
    return Link(tuple(sizes), tuple(seconds), fit_costs(amounts, np.array(seconds)))


def measure_link_alone(
    num_ranks: int, use_cuda: bool, sizes: Sequence[int] = SIZES, repeats: int = 5
) -> Link:
    """Start ``num_ranks`` ranks on this machine and let them measure the link among them."""
    import tempfile

    import torch.multiprocessing

    with tempfile.TemporaryDirectory(prefix="anchorcontext-links-") as folder:
        torch.multiprocessing.spawn(
            _rank_main, (num_ranks, use_cuda, folder, tuple(sizes), repeats), nprocs=num_ranks
        )
        found: Link = torch.load(os.path.join(folder, "link"), weights_only=False)
        return found


def _rank_main(
    rank: int, num_ranks: int, use_cuda: bool, folder: str, sizes: tuple[int, ...], repeats: int
) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(os.path.join(folder, "store"), num_ranks)
    dist.init_process_group(
        "nccl" if use_cuda else "gloo", store=store, rank=rank, world_size=num_ranks
    )
    try:
        link = measure_link(1, device, sizes, repeats)
        if rank == 0:
            torch.save(link, os.path.join(folder, "link"))
        dist.barrier()
    finally:
        dist.destroy_process_group()
