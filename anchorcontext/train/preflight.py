"""Before the first step: do all ranks run the same thing, and do they reach each other?

Every check compares what the ranks report and fails on all of them with one message that says which
ranks, on which hosts, differ. Ranks that disagree would otherwise hang in a collective, or train on
different data without a word.
"""

from __future__ import annotations

import importlib.metadata
import logging
import platform
import socket
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from anchorcontext.kernels import cpu_library

from ..config import Config, config_hash, flat_values
from ..errors import UserError

if TYPE_CHECKING:
    from ..data import WindowDataset
    from ..parallel import Mesh
    from .control import Control
    from .launch import Process

logger = logging.getLogger(__name__)

Preflight = Callable[[Config, "Process", "Mesh", "WindowDataset"], None]
"""What a caller adds to the checks, before the model is built; collective."""

PACKAGES = ("anchorcontext", "torch", "deepspeed", "transformers", "tokenizers", "numpy", "pyarrow")


class Ranks:
    """The ranks of the job with their hosts, as messages name them."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.hosts: list[str] = control.gather(socket.gethostname())

    def name(self, ranks: Sequence[int]) -> str:
        """``ranks 0-7 (n1), 8 (n2)``; a single one is ``rank 8 (n2)``."""
        by_host: dict[str, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(self.hosts[rank], []).append(rank)
        places = ", ".join(f"{_spans(own)} ({host})" for host, own in by_host.items())
        return f"rank{'s' if len(ranks) > 1 else ''} {places}"

    def differences(self, values: Sequence[Hashable]) -> str:
        """``A on ranks 0-7 (n1); B on rank 8 (n2)``; empty where all ranks have one value."""
        groups: dict[Hashable, list[int]] = {}
        for rank, value in enumerate(values):
            groups.setdefault(value, []).append(rank)
        if len(groups) == 1:
            return ""
        return "; ".join(f"{value} on {self.name(ranks)}" for value, ranks in groups.items())

    def refuse(self, problem: str | None, fix: str) -> None:
        """Raise on every rank if any rank has a problem; ranks with the same one are named as one.

        Raises:
            UserError: the problems, each with its ranks, and the fix.
        """
        problems = self.control.gather(problem)
        groups: dict[str, list[int]] = {}
        for rank, text in enumerate(problems):
            if text is not None:
                groups.setdefault(text, []).append(rank)
        if groups:
            found = "; ".join(f"{self.name(ranks)}: {text}" for text, ranks in groups.items())
            raise UserError(f"{found}; {fix}")


def check_same_setup(config: Config, control: Control) -> None:
    """All ranks read the same config and run the same packages.

    Raises:
        UserError: names every key or package that differs, its values, their ranks and hosts.
    """
    ranks = Ranks(control)
    mine = (config_hash(config), versions())
    hashes, packages = zip(*control.gather(mine), strict=True)
    if len(set(hashes)) > 1:
        flat = control.gather(flat_values(config))
        keys = sorted({key for values in flat for key in values})
        found = {key: ranks.differences([repr(v.get(key)) for v in flat]) for key in keys}
        lines = [f"{key} = {text}" for key, text in found.items() if text]
        raise UserError(
            f"the ranks have different configs: {'. '.join(lines)}. Start all of them with the "
            "same file and the same KEY=VALUE arguments"
        )
    lines = []
    for name in packages[0]:
        text = ranks.differences([found[name] for found in packages])
        if text:
            lines.append(f"{name} {text}")
    if lines:
        raise UserError(
            f"the ranks run different versions: {'. '.join(lines)}. Install the same on all hosts"
        )


def check_same_data(dataset: WindowDataset, control: Control) -> None:
    """All ranks see the same prepared windows.

    Raises:
        UserError: names the fingerprints, their ranks and hosts.
    """
    fingerprints = control.gather(dataset.fingerprint)
    text = Ranks(control).differences(fingerprints)
    if text:
        raise UserError(
            f"data.path = {str(dataset.path)!r} holds different windows on different hosts, by "
            f"fingerprint: {text}. Copy one prepared folder to all of them, or share it"
        )


def check_links(process: Process, mesh: Mesh) -> None:
    """One all-reduce over all ranks, a message from each rank to the next one, and one to each of
    its SP group: NCCL connects two ranks at their first message, which no step should wait for.

    Raises:
        RankError: a number did not arrive as it was sent.
    """
    rank, world_size = process.rank, process.world_size
    if world_size == 1:
        return
    total = torch.full((1024,), float(rank + 1), device=process.device)
    dist.all_reduce(total)
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    received = [(left, _exchanged(process, [right], [left], None)[0])]
    if mesh.sp_group is not None:
        peers = [peer for peer in dist.get_process_group_ranks(mesh.sp_group) if peer != rank]
        received += zip(peers, _exchanged(process, peers, peers, mesh.sp_group), strict=True)
    with process.control.together("exercising the links"):
        expected = world_size * (world_size + 1) / 2
        host = socket.gethostname()
        if not bool((total == expected).all()):
            raise RuntimeError(f"on {host} an all-reduce gave {total[0]} instead of {expected}")
        for sender, values in received:
            if not bool((values == sender).all()):
                raise RuntimeError(f"on {host} a message of rank {sender} arrived as {values[0]}")


def _exchanged(
    process: Process, to: Sequence[int], of: Sequence[int], group: dist.ProcessGroup | None
) -> list[torch.Tensor]:
    """What the ranks ``of`` sent here, while this one sent its number ``to`` others."""
    sent = torch.full((1024,), float(process.rank), device=process.device)
    received = [torch.empty_like(sent) for _ in of]
    operations = [dist.P2POp(dist.isend, sent, peer, group) for peer in to]
    operations += [
        dist.P2POp(dist.irecv, into, peer, group) for into, peer in zip(received, of, strict=True)
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def warn_of_spread_groups(ranks: Ranks, sp: int) -> None:
    """Say where an SP group lies on several hosts although one host has room for it: its keys and
    values then cross the network in every layer, and nothing but time tells."""
    groups = [range(first, first + sp) for first in range(0, len(ranks.hosts), sp)]
    spread = [group for group in groups if len({ranks.hosts[rank] for rank in group}) > 1]
    room = sum(here // sp for here in Counter(ranks.hosts).values())
    if ranks.control.rank == 0 and spread and room >= len(groups):
        logger.warning(
            "%s share windows across hosts, though each group of %d ranks has room on one: number "
            "the ranks host by host (srun --distribution=block)",
            *(ranks.name(spread[0]), sp),
        )


def versions() -> dict[str, str]:
    """What has to be the same on every rank."""
    found = {"python": platform.python_version(), "CUDA": str(torch.version.cuda or "none")}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    if not torch.cuda.is_available():
        # Attention through torch alone differs in rounding.
        found["C compiler"] = "there" if cpu_library.why_not() is None else "missing"
    # torch's own number carries the build (+cpu, +cu128), the metadata's may not.
    return found | {"torch": torch.__version__}


def _spans(numbers: list[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``0-2,5``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{low}-{high}" if high > low else str(low) for low, high in spans)
