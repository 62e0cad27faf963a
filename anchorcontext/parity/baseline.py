"""What a distributed run is compared with: one process that holds whole windows and all weights.

``StockBaseline`` is transformers as it comes, with an explicit dense mask: an oracle that shares no
code with ours, for windows short enough for an L x L mask. ``SingleDeviceBaseline`` is our own path
on one device, at any length.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from ..config.sections import AttentionSection
from ..model import TrainModel, enable
from ..model.memory import checkpoint_layers
from ..model.precision import set_precision
from ..modes import IGNORE
from ..parallel import make_plan, shard
from ..window import Window
from .oracle import expected_mask, expected_positions

# Tokens whose logits are held in fp64 at once.
ORACLE_ROWS = 128


@dataclass(frozen=True)
class BaselineRun:
    """One window on one device."""

    loss_sum: float
    """Summed cross-entropy over the window's targets, nats."""
    logits: Callable[[torch.Tensor], torch.Tensor]
    """Tokens (n,) int64 of the window -> their logits (n, V)."""


class Baseline(Protocol):
    """One process with all the weights."""

    name: str

    def run(self, window: Window, scale: float | None) -> BaselineRun:
        """Run a window; with ``scale``, add the gradient of ``scale`` times its summed loss."""

    def gradients(self) -> dict[str, torch.Tensor]:
        """fp32 gradients so far on the CPU, by the parameters' Hugging Face names."""


class _Gradients:
    """Gradients added up over windows: in fp32 whatever dtype a backward leaves them in, and in CPU
    memory, since the device of rank 0 holds its share of the distributed run as well."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._sums: dict[str, torch.Tensor] = {}

    def collect(self) -> None:
        """Take the gradients of one backward out of the parameters."""
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                continue
            gradient = parameter.grad.to("cpu", torch.float32)
            if name in self._sums:
                self._sums[name] += gradient
            else:
                self._sums[name] = gradient
            parameter.grad = None

    def sums(self) -> dict[str, torch.Tensor]:
        """The sums; zero for a parameter that no window used."""
        return {
            name: self._sums.get(name, torch.zeros(parameter.shape))
            for name, parameter in self._parameters.items()
        }


class StockBaseline:
    """Stock transformers (its ``sdpa`` attention) with an additive L x L mask (:mod:`.oracle`).

    It rounds as stock does, whatever ``attention.precision`` says: a run that rounds less is judged
    by the same multiple of stock's distance to fp32. Holds all logits of a window and their
    gradient: for ``parity.stock_tokens`` tokens, not for training lengths.

    Args:
        like: the enabled model; only its class and config are read.
        weights: whole state dict by Hugging Face names; not copied where dtype and device agree.
        dtype, device: of the baseline.
    """

    name = "stock transformers"

    def __init__(
        self,
        like: PreTrainedModel,
        weights: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._model = copy_model(like, weights, dtype, device, attention="sdpa")
        self._gradients = _Gradients(self._model)

    def run(self, window: Window, scale: float | None) -> BaselineRun:
        """See :class:`Baseline`."""
        device, dtype = self._model.device, self._model.dtype
        mask = torch.from_numpy(expected_mask(window)).to(device)
        # A boolean mask would be *added* by the eager attention of transformers.
        additive = torch.zeros(mask.shape, dtype=dtype, device=device)
        additive.masked_fill_(~mask, torch.finfo(dtype).min)
        with torch.set_grad_enabled(scale is not None):
            logits = self._model(
                input_ids=_row(window.input_ids, device),
                position_ids=_row(expected_positions(window), device),
                attention_mask=additive[None, None],
                use_cache=False,
            ).logits[0]
        labels = _row(window.labels, device)[0]
        loss_sum, d_logits = exact_cross_entropy(logits.detach(), labels, scale)
        if d_logits is not None:
            logits.backward(d_logits)
            self._gradients.collect()
        logits = logits.detach()
        return BaselineRun(loss_sum, lambda tokens: logits[tokens.to(device)])

    def gradients(self) -> dict[str, torch.Tensor]:
        """See :class:`Baseline`."""
        return self._gradients.sums()


class SingleDeviceBaseline:
    """Our own path on one device: a plan without a group, ``TrainModel``, the chunked loss.

    Args:
        like, weights, dtype, device: as of :class:`StockBaseline`.
        chunk_tokens: of the chunked loss.
        attention: the config's section; its precision is used, and its engine for ``like``'s dtype.
    """

    name = "single device"

    def __init__(
        self,
        like: PreTrainedModel,
        weights: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
        chunk_tokens: int,
        attention: AttentionSection,
    ) -> None:
        model = enable(copy_model(like, weights, dtype, device, attention=None))
        set_precision(model, attention.precision)
        # Recomputes the very same numbers; without it a long window does not fit.
        checkpoint_layers(model)
        self._train_model = TrainModel(model, chunk_tokens).train()
        # The fp32 run that bf16 is judged by: flash attention has no fp32.
        self._engine = attention.engine if dtype == like.dtype else "auto"
        self._exact = attention.exact
        self._device = device
        self._gradients = _Gradients(model)
        self._head = head_weight(model)

    def run(self, window: Window, scale: float | None) -> BaselineRun:
        """See :class:`Baseline`."""
        plan = make_plan(window, engine=self._engine, exact=self._exact)
        local = shard(window, plan, self._device)
        with torch.set_grad_enabled(scale is not None), captured_hidden(self._train_model) as seen:
            loss, _ = self._train_model(local.input_ids, local.position_ids, local.labels, plan)
        if scale is not None:
            (loss * scale).backward()
            self._gradients.collect()
        (hidden,) = seen
        return BaselineRun(
            float(loss.detach()), lambda tokens: logits_of(hidden[0], self._head, tokens)
        )

    def gradients(self) -> dict[str, torch.Tensor]:
        """See :class:`Baseline`."""
        return self._gradients.sums()


def copy_model(
    like: PreTrainedModel,
    weights: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
    attention: str | None,
) -> PreTrainedModel:
    """A model of the same class and config as ``like`` around other weights, in training mode.

    Built by transformers itself, so that RoPE's tables come from the config and not from ``like``.
    ``attention`` names a stock attention implementation; None leaves the choice to ``enable``.
    """
    config = copy.deepcopy(like.config)
    with _no_weight_bar():
        model = type(like).from_pretrained(
            None,
            config=config,
            state_dict=dict(weights),
            dtype=dtype,
            attn_implementation=attention or "sdpa",
        )
    assert isinstance(model, PreTrainedModel)
    # Not ``.to(dtype)``: that would round the buffers, too.
    return model.to(device).train()


def exact_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, scale: float | None
) -> tuple[float, torch.Tensor | None]:
    """Summed cross-entropy of ``logits`` (N, V) over the targets ``labels`` (N,), in fp64.

    Also the gradient of ``scale`` times it, in the logits' dtype. Not ``F.cross_entropy`` in fp32:
    on CPUs its sums over a vocabulary of 49,152 are off by 1e-5, which moved the gradients of a
    pretrained model, where most targets are near certain, by 1e-3.
    """
    total, d_logits = 0.0, None if scale is None else torch.empty_like(logits)
    for start in range(0, len(logits), ORACLE_ROWS):
        rows = slice(start, start + ORACLE_ROWS)
        with torch.enable_grad():
            wide = logits[rows].double().requires_grad_()
            loss = F.cross_entropy(wide, labels[rows], ignore_index=IGNORE, reduction="sum")
        total += float(loss.detach())
        if d_logits is not None and scale is not None:
            (gradient,) = torch.autograd.grad(loss * scale, wide)
            d_logits[rows] = gradient.to(logits.dtype)
    return total, d_logits


@contextmanager
def captured_hidden(train_model: TrainModel) -> Iterator[list[torch.Tensor]]:
    """Collect the hidden states (B, S, D) that the head gets, one a forward, detached."""
    seen: list[torch.Tensor] = []

    def keep(module: nn.Module, args: object, output: object) -> None:
        seen.append(output.last_hidden_state.detach())  # type: ignore[attr-defined]

    handle = train_model.causal_lm.get_decoder().register_forward_hook(keep)
    try:
        yield seen
    finally:
        handle.remove()


def head_weight(model: PreTrainedModel) -> torch.Tensor:
    """The head's weight (V, D) in fp32, whole also under ZeRO-3; collective there."""
    weight = model.get_output_embeddings().weight
    if not hasattr(weight, "ds_id"):
        return weight.detach().float()
    import deepspeed

    with deepspeed.zero.GatheredParameters([weight]):
        return weight.detach().float().clone()


def logits_of(hidden: torch.Tensor, head: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """fp32 logits (n, V) of the rows (n,) of ``hidden`` (S, D), as the loss forms them."""
    return F.linear(hidden[rows.to(hidden.device)].float(), head)


def _row(values: object, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)[None]


@contextmanager
def _no_weight_bar() -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
