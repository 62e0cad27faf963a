"""A hardware profile of the machine at hand: rates and fixed costs, measured and fitted.

* *Matrix products*: a linear layer forward and backward on several numbers of tokens,
  ``seconds = call + flops / rate``; the peak is a large square product.
* *Attention*: one layer forward and backward through the plan and the engine, on windows of
  documents of several lengths, ``seconds = call + tiles * per_tile + pairs / rate``.
* *Memory*: a copy.
* *Links*: :mod:`.links`, between ranks of this node and, under a launcher, across nodes.

What cannot be measured here (the network of a single node, links of a single GPU) is taken from a
base profile, and the profile written says so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..hardware import Hardware
from ..parallel import distributed_attention, make_plan
from ..watch.flops import ATTENTION_BACKWARD_FLOPS, ATTENTION_FORWARD_FLOPS, known_peak_flops
from ..window import Window
from .fit import Fit, fit_costs
from .links import SIZES, Link, measure_link, measure_link_alone

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LEAST_SECONDS, MOST_REPEATS = 0.5, 100
"""How long, and how often at most, something short is repeated."""


@dataclass(frozen=True)
class Settings:
    """How much is measured; the defaults suit one core of a CPU."""

    dtype: str = "fp32"
    """Of the run that the profile is for: ``"bf16"`` or ``"fp32"``."""
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    hidden_size: int = 1024
    attention_tokens: int = 2048
    document_lengths: tuple[int, ...] = (16, 64, 256, 1024, 2048)
    """Mean lengths; documents are between 3/4 and 5/4 of them."""
    linear_tokens: tuple[int, ...] = (128, 512, 2048)
    square: int = 1024
    """Side of the square product."""
    copy_bytes: int = 1 << 27
    link_sizes: tuple[int, ...] = SIZES
    ranks: int = 2
    """Ranks to start for the link, where no launcher has."""
    repeats: int = 3

    @classmethod
    def of_gpu(cls) -> Settings:
        """As much as fills a data-centre GPU."""
        return cls(
            dtype="bf16",
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            hidden_size=4096,
            attention_tokens=65536,
            document_lengths=(512, 1024, 4096, 16384, 65536),
            linear_tokens=(2048, 8192, 32768),
            square=8192,
            copy_bytes=1 << 30,
            link_sizes=(*SIZES, 1 << 27),
            repeats=5,
        )

    def of_length(self, tokens: int) -> Settings:
        """Attention on windows, and at longest documents, of ``tokens``."""
        lengths = tuple(max(tokens >> shift, 8) for shift in (7, 5, 3, 1, 0))
        return replace(self, attention_tokens=tokens, document_lengths=lengths)


@dataclass(frozen=True)
class Measured:
    """One figure of the profile."""

    what: str
    key: str
    value: float
    residual: float | None
    """Root mean squared relative error of its fit; None where nothing was fitted."""
    how: str


@dataclass(frozen=True)
class Calibration:
    """The profile, and where each figure comes from."""

    hardware: Hardware
    measured: list[Measured]
    kept: list[str]
    """Keys taken from the base profile."""
    base: str
    dtype: str

    @property
    def remarks(self) -> dict[str, str]:
        """A word to every figure of the profile's YAML."""
        remarks = {item.key: item.how for item in self.measured}
        return remarks | dict.fromkeys(self.kept, f"not measured, from {self.base}")


def calibrate(base: Hardware, settings: Settings, device: torch.device, name: str) -> Calibration:
    """Measure this machine; collective where a launcher has started several ranks."""
    measured = _compute(settings, device) + _links(settings, device)
    figures: dict[str, Any] = {item.key: item.value for item in measured}
    kind = "gpu" if device.type == "cuda" else "cpu"
    hardware = replace(base, name=name, kind=kind, **figures)
    kept = [f.name for f in fields(Hardware) if f.name not in {"name", "kind", *figures}]
    return Calibration(hardware, measured, kept, base.name, settings.dtype)


def _compute(settings: Settings, device: torch.device) -> list[Measured]:
    linear, linear_fit = measure_linear(settings, device)
    attention, per_tile, attention_fit = measure_attention(settings, device)
    found = []
    for dtype in DTYPES:
        peak, how = _peak(dtype, settings, device)
        if dtype == settings.dtype and peak < max(linear, attention):
            peak, how = max(linear, attention), "the fastest of all products measured"
        found.append(Measured(f"peak, {dtype}", f"peak_{dtype}_flops", peak, None, how))
    peak = next(item.value for item in found if item.key == f"peak_{settings.dtype}_flops")
    size = f"{settings.num_heads}/{settings.num_kv_heads} heads of {settings.head_dim}"
    rate = _copy_rate(settings, device)
    copied = f"a copy of {settings.copy_bytes >> 20} MiB"
    devices, per_device = _memory(device)
    return [
        *found,
        Measured(
            "matrix products",
            "compute_fraction",
            linear / peak,
            linear_fit.residual,
            f"{settings.dtype}, hidden size {settings.hidden_size}, forward and backward: "
            f"{linear:.3g} FLOP/s",
        ),
        Measured(
            "attention",
            "attention_fraction",
            attention / peak,
            attention_fit.residual,
            f"{settings.dtype}, {size}, forward and backward: {attention:.3g} FLOP/s",
        ),
        Measured(
            "a tile's fixed cost",
            "seconds_per_tile",
            per_tile,
            attention_fit.residual,
            "forward and backward of all heads",
        ),
        Measured("memory", "memory_bytes", per_device, None, "of one device"),
        Measured("memory rate", "memory_bytes_per_second", rate, None, copied),
        Measured("devices", "devices_per_node", devices, None, "of this node"),
    ]


def measure_linear(settings: Settings, device: torch.device) -> tuple[float, Fit]:
    """FLOP/s of a linear layer, forward and backward, and its fit over several sizes."""
    hidden, dtype = settings.hidden_size, DTYPES[settings.dtype]
    weight = torch.randn(4 * hidden, hidden, dtype=dtype, device=device).requires_grad_()
    amounts, seconds = [], []
    for tokens in settings.linear_tokens:
        x = torch.randn(tokens, hidden, dtype=dtype, device=device).requires_grad_()
        dout = torch.randn(tokens, 4 * hidden, dtype=dtype, device=device)

        def step(x: torch.Tensor = x, dout: torch.Tensor = dout) -> None:
            torch.nn.functional.linear(x, weight).backward(dout)

        seconds.append(best_seconds(step, device, settings.repeats))
        amounts.append((1.0, 6.0 * tokens * weight.numel()))
    fit = fit_costs(np.array(amounts), np.array(seconds))
    return 1 / fit.costs[1], fit


def measure_attention(settings: Settings, device: torch.device) -> tuple[float, float, Fit]:
    """FLOP/s of attention, seconds a tile, and the fit over documents of several lengths."""
    length, dtype = settings.attention_tokens, DTYPES[settings.dtype]
    q, k, v, dout = (
        torch.randn(1, heads, length, settings.head_dim, dtype=dtype, device=device)
        for heads in (
            settings.num_heads,
            settings.num_kv_heads,
            settings.num_kv_heads,
            settings.num_heads,
        )
    )
    amounts, seconds = [], []
    for mean in settings.document_lengths:
        plan = make_plan(_documents(length, mean))

        def step() -> None:
            own_q, own_k, own_v = (x.detach().requires_grad_() for x in (q, k, v))
            out = distributed_attention(own_q, own_k, own_v, plan)  # noqa: B023  called at once
            out.backward(dout)

        seconds.append(best_seconds(step, device, settings.repeats))
        amounts.append((1.0, len(plan.mine.steps[0].tiles), plan.num_pairs))
    fit = fit_costs(np.array(amounts, dtype=float), np.array(seconds))
    per_pair = (ATTENTION_FORWARD_FLOPS + ATTENTION_BACKWARD_FLOPS) * settings.head_dim
    return per_pair * settings.num_heads / fit.costs[2], fit.costs[1], fit


def best_seconds(step: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The fastest of ``repeats`` calls, of more where they are short, after one that warms up."""
    times: list[float] = []
    while len(times) <= repeats or (sum(times) < LEAST_SECONDS and len(times) < MOST_REPEATS):
        _synchronise(device)
        started = time.perf_counter()
        step()
        _synchronise(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def _documents(length: int, mean: int) -> Window:
    """A window of documents of uneven lengths around ``mean``; the last one fills it."""
    rng = np.random.default_rng(mean)
    lengths: list[int] = []
    while sum(lengths) < length:
        lengths.append(int(rng.integers(max(3 * mean // 4, 1), 5 * mean // 4 + 1)))
    lengths[-1] -= sum(lengths) - length
    edges = np.r_[0, np.cumsum(lengths)]
    return Window(np.zeros(length, dtype=np.int64), edges, "intra_doc")


def _peak(dtype: str, settings: Settings, device: torch.device) -> tuple[float, str]:
    """FLOP/s at most: the vendor's figure of a known GPU, else a large square product's."""
    if device.type == "cuda":
        known = known_peak_flops(torch.cuda.get_device_name(device), DTYPES[dtype])
        if known is not None:
            return known, f"as the vendor states of {torch.cuda.get_device_name(device)}"
    side = settings.square
    a, b = (torch.randn(side, side, dtype=DTYPES[dtype], device=device) for _ in range(2))
    seconds = best_seconds(lambda: torch.matmul(a, b), device, settings.repeats)
    return 2 * side**3 / seconds, f"a product of {side} x {side} matrices"


def _copy_rate(settings: Settings, device: torch.device) -> float:
    source = torch.zeros(settings.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = best_seconds(lambda: target.copy_(source), device, settings.repeats)
    return 2 * settings.copy_bytes / seconds


def _memory(device: torch.device) -> tuple[int, float]:
    """Devices of this node, and bytes of one of them; a CPU's rank has one core and its share."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return torch.cuda.device_count(), float(total)
    import psutil

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    devices = max((cores or 1) // torch.get_num_threads(), 1)
    return devices, psutil.virtual_memory().total / devices


def _links(settings: Settings, device: torch.device) -> list[Measured]:
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world > 1:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        links = {}
        if local > 1:
            links["node"] = measure_link(1, device, settings.link_sizes)
        if world > local:
            links["network"] = measure_link(local, device, settings.link_sizes)
        return _link_figures(links, f"{world} ranks, {local} a node")
    use_cuda = device.type == "cuda"
    ranks = min(settings.ranks, torch.cuda.device_count()) if use_cuda else settings.ranks
    if ranks < 2:
        return []
    link = measure_link_alone(ranks, use_cuda, settings.link_sizes)
    return _link_figures({"node": link}, f"{ranks} ranks, {'NCCL' if use_cuda else 'gloo'}")


def _link_figures(links: dict[str, Link], how: str) -> list[Measured]:
    """The rate of each kind of link; a message's fixed cost is that of the slower kind."""
    found = [
        Measured(
            f"{kind} link",
            f"{kind}_bytes_per_second",
            link.bytes_per_second,
            link.fit.residual,
            how,
        )
        for kind, link in links.items()
    ]
    if links:
        worst = max(links.values(), key=lambda link: link.seconds_per_message)
        latency = max(worst.seconds_per_message, 1e-9)
        residual = worst.fit.residual
        found.append(Measured("a message", "seconds_per_message", latency, residual, how))
    return found


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


HEADERS = ("measured", "figure of the profile", "value", "fit's residual", "how")


def table_rows(calibration: Calibration) -> Sequence[tuple[str, ...]]:
    """Rows of the printed table."""
    return [
        (
            item.what,
            item.key,
            f"{item.value:.4g}",
            "-" if item.residual is None else f"{item.residual:.1%}",
            item.how,
        )
        for item in calibration.measured
    ]
