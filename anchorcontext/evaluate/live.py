"""The measures of the config's section ``evaluate``, on the live weights of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..data.store import VALIDATION, WindowDataset
from ..data.tokenizer import load_tokenizer
from ..errors import UserError
from ..parallel import Mesh
from .documents import HeldOutDocuments
from .loss import held_out_losses, held_out_probes
from .needles import hit_rates, needle_excerpts, needle_probes
from .positions import position_buckets, position_edges, position_probes
from .probes import Probe
from .tally import Tally, tally

if TYPE_CHECKING:
    from ..config import Config
    from ..data.view import View


@dataclass(frozen=True)
class Measure:
    """Probes and what their tally is called."""

    name: str
    probes: Sequence[Probe]
    num_groups: int
    values: Callable[[Tally], Mapping[str, float | None]]
    """A tally's figures by name, behind ``name/``; None for one that does not exist."""

    def on(
        self, model: nn.Module, mesh: Mesh, device: torch.device, options: Mapping[str, Any]
    ) -> dict[str, float]:
        """The figures on these weights, the same on every rank; collective. Arguments as of
        :func:`~anchorcontext.evaluate.tally.tally`."""
        found = self.values(tally(model, self.probes, self.num_groups, mesh, device, options))
        return {f"{self.name}/{key}": value for key, value in found.items() if value is not None}


def build_measures(config: Config, training: WindowDataset, view: View) -> list[Measure]:
    """What the section asks for; none where it asks for no evaluation.

    Args:
        training: the windows of the run.
        view: how the run sees their records.

    Raises:
        UserError: there are no held-out windows or documents of these lengths, or no tokenizer.
    """
    section = config.evaluate
    if section.every is None:
        return []
    lengths = section.lengths or (training.window_tokens,)
    bos = training.anchor_id if view.anchor_token is None else view.anchor_token

    @cache
    def documents() -> HeldOutDocuments:
        return HeldOutDocuments(WindowDataset(training.path, VALIDATION))

    makers: dict[str, Callable[[], Measure]] = {
        "held_out": lambda: _held_out(training, view, lengths, section.windows),
        "loss_by_position": lambda: _by_position(documents(), bos, max(lengths), section.documents),
        "niah_single": lambda: _needles(
            training,
            documents() if VALIDATION in (training.meta or {})["splits"] else None,
            bos,
            lengths,
            section.needles,
        ),
    }
    return [makers[task]() for task in section.tasks]


def _held_out(
    training: WindowDataset, view: View, lengths: Sequence[int], num_windows: int
) -> Measure:
    validation = WindowDataset(training.path, VALIDATION)
    probes = held_out_probes(validation, lengths, view.window, num_windows)

    def values(found: Tally) -> dict[str, float | None]:
        losses = held_out_losses(found, lengths)
        return {str(length): loss for length, loss in losses.items()}

    return Measure("held_out", probes, len(lengths), values)


def _by_position(held_out: HeldOutDocuments, bos: int | None, length: int, count: int) -> Measure:
    documents = held_out.long_ones(length - (bos is not None), count)
    if not documents:
        raise UserError(
            f"loss_by_position: the longest held-out document of {held_out.path} has "
            f"{held_out.longest} tokens, and evaluate.lengths asks for {length}; set it to at most "
            f"{held_out.longest}, or hold out more documents (data.validation_fraction)"
        )
    edges = position_edges(length)

    def values(found: Tally) -> dict[str, float | None]:
        return {f"{b.start}-{b.stop}": b.loss for b in position_buckets(edges, found)}

    probes = position_probes(documents, edges, bos)
    return Measure("loss_by_position", probes, len(edges) - 1, values)


def _needles(
    training: WindowDataset,
    held_out: HeldOutDocuments | None,
    bos: int | None,
    lengths: Sequence[int],
    samples: int,
) -> Measure:
    haystack = None if held_out is None else held_out.text(max(lengths))
    tokenizer = load_tokenizer(training.tokenizer_path)
    excerpts = needle_excerpts(tokenizer, lengths, samples=samples, bos=bos, haystack=haystack)
    probes = needle_probes(excerpts, max(lengths))

    def values(found: Tally) -> dict[str, float | None]:
        rates = hit_rates(found, lengths, samples)
        return {str(length): rate for length, rate in rates.items()}

    return Measure("niah_single", probes, len(lengths) * samples, values)
