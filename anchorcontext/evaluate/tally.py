"""Losses of probes, summed by group over all ranks; the model and the run stay as they are."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ..modes import IGNORE
from ..parallel import Mesh, make_plan, shard
from ..parallel.mesh import group_device
from .probes import NOT_COUNTED, Probe


@dataclass(frozen=True)
class Tally:
    """What the targets of G groups came to, over all ranks; the same on every rank."""

    loss: np.ndarray
    """(G,) fp64 summed cross-entropy, nats."""
    targets: np.ndarray
    """(G,) int64 number of targets."""
    hits: np.ndarray
    """(G,) int64 targets that have the largest logit."""

    def mean_loss(self, groups: slice = slice(None)) -> float | None:
        """Loss per target over some groups: one sum over one count; None without targets."""
        targets = int(self.targets[groups].sum())
        return float(self.loss[groups].sum()) / targets if targets else None


def tally(
    model: nn.Module,
    probes: Sequence[Probe],
    num_groups: int,
    mesh: Mesh,
    device: torch.device,
    options: Mapping[str, Any],
) -> Tally:
    """Score ``probes`` with the training attention core; collective over all ranks of the mesh.

    Probes are dealt to the data-parallel ranks in rounds. Under ZeRO-3 all of them must take part
    in every forward: one without a probe in the last round computes that round's last one again,
    uncounted.

    Args:
        model: ``TrainModel``, plain or the module of a live DeepSpeed engine of any ZeRO stage; its
            modes and the random states are afterwards as before.
        probes: the same on every rank.
        num_groups: G, groups that probes may name.
        options: of :func:`~anchorcontext.parallel.make_plan`.
    """
    sums = np.zeros((3, num_groups))
    with undisturbed(model, device):
        for first in range(0, len(probes), mesh.dp):
            number = first + mesh.dp_rank
            counted = number < len(probes)
            probe = probes[number if counted else -1]
            found = _score(model, probe, num_groups, mesh, device, options)
            if counted:
                sums += found
    loss, targets, hits = _sum_over_ranks(sums)
    return Tally(loss, targets.astype(np.int64), hits.astype(np.int64))


def _score(
    model: nn.Module,
    probe: Probe,
    num_groups: int,
    mesh: Mesh,
    device: torch.device,
    options: Mapping[str, Any],
) -> np.ndarray:
    """(3, G) fp64: losses, targets and hits of the tokens that this rank holds."""
    plan = make_plan(probe.window, mesh.sp_group, **options)
    local = shard(probe.window, plan, device)
    tokens = plan.data.local_indices(plan.sp_rank, 0)
    padding = plan.padded_length - len(probe.groups)
    groups = np.r_[probe.groups, np.full(padding, NOT_COUNTED)][tokens]
    counts = torch.from_numpy(groups != NOT_COUNTED).to(device)
    labels = local.labels.masked_fill(~counts, IGNORE)
    losses, hits = model(local.input_ids, local.position_ids, labels, plan, reduction="none")
    scored = (labels != IGNORE)[0].cpu().numpy()
    weights = (losses[0].cpu().numpy().astype(np.float64), None, hits[0].cpu().numpy())
    return np.stack(
        [
            np.bincount(
                groups[scored],
                weights=None if weight is None else weight[scored],
                minlength=num_groups,
            ).astype(np.float64)
            for weight in weights
        ]
    )


def _sum_over_ranks(values: np.ndarray) -> np.ndarray:
    """The sum of fp64 arrays over all ranks, added in rank order, on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    group = dist.group.WORLD
    assert group is not None
    mine = torch.from_numpy(values).to(group_device(group))
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    total: np.ndarray = torch.stack(everyone).cpu().numpy().sum(axis=0)
    return total


@contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluation mode without gradients; modes of all modules and random states come back."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), preserved_rng(device):
            yield
    finally:
        for module, mode in training.items():
            module.training = mode


@contextmanager
def preserved_rng(device: torch.device) -> Iterator[None]:
    """The random states of torch, NumPy and Python are afterwards as before."""
    states = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
