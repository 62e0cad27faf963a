"""Speed of each engine: FLOP rate of forward and backward, by mode and length.

The yardstick is torch's own attention on one causal sequence of equal FLOPs, in the same run: what
the device does when nothing is packed. Beside the engines, for documents: a torch call for each.
FLOPs are those of the visible pairs, 4 D Hq a pair forward and 2.5 times that backward. An engine
adds to accumulators that its caller made, so these are made before the clock starts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from anchorcontext.kernels import Engine, SoftmaxState, engine_report, get_engine

from ..markdown import markdown_table
from .attention import Attention, causal_call

BACKWARD_FLOPS = 2.5
PER_DOCUMENT = "torch, a call a document"
YARDSTICK = "torch, one causal call"
_GPU_SECONDS, _MOST_CALLS = 0.1, 50
MODES = ("full", "intra_doc", "anchor")


@dataclass(frozen=True)
class KernelSpeed:
    """One contestant on one window."""

    mix: str
    mode: str
    tokens: int
    contestant: str
    gflops: float
    """FLOPs of one forward, 1e9."""
    forward_seconds: float
    """The fastest repeat, as the next."""
    backward_seconds: float
    over_yardstick: float
    """FLOP rate of forward and backward over that of the causal call of equal FLOPs."""

    @property
    def forward_rate(self) -> float:
        """GFLOP/s."""
        return self.gflops / self.forward_seconds

    @property
    def backward_rate(self) -> float:
        """GFLOP/s."""
        return BACKWARD_FLOPS * self.gflops / self.backward_seconds


# Gets ready and returns what runs a forward and returns what runs its backward.
Backward = Callable[[], object]
Contestant = Callable[[], Callable[[], Backward]]


def bench_kernels(
    *,
    lengths: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
    mixes: Sequence[str] = ("slimpajama",),
    modes: Sequence[str] = MODES,
    engines: Sequence[str] | None = None,
    repeats: int = 3,
    seed: int = 0,
    failed: Callable[[str, Exception], None] | None = None,
) -> list[KernelSpeed]:
    """Time every engine that can serve (or those named) and torch's own calls, in turn.

    With ``failed``, a contestant that raises is left out and ``failed`` gets its name and error.

    Raises:
        UserError: an engine named cannot serve, or there is no such mix.
    """
    results = []
    for mix, tokens in product(mixes, lengths):
        for mode in modes:
            attention = Attention.draw(
                mode, tokens, mix=mix, heads=heads, head_dim=head_dim,
                dtype=dtype, device=device, seed=seed,
            )  # fmt: skip
            contestants = _contestants(attention, mode, engines)
            seconds = _time_in_turn(contestants, device, repeats, failed)
            whole = {name: sum(parts) for name, parts in seconds.items()}
            results += [
                KernelSpeed(
                    mix,
                    mode,
                    tokens,
                    name,
                    attention.flops / 1e9,
                    *seconds[name],
                    over_yardstick=whole.get(YARDSTICK, math.nan) / whole[name],
                )
                for name in seconds
            ]
    return results


def _contestants(
    attention: Attention, mode: str, engines: Sequence[str] | None
) -> dict[str, Contestant]:
    q = attention.q
    able = [name for name, why in engine_report(q.device, q.dtype).items() if why is None]
    # The reference engine is dense: it shows nothing but its own cost.
    names = engines if engines is not None else [name for name in able if name != "reference"]
    found: dict[str, Contestant] = {}
    accumulators = SoftmaxState.empty(q), attention.gradients()  # the engines take turns
    for name in names:
        engine = get_engine(name, device=q.device, dtype=q.dtype)
        found[name] = _engine_contestant(attention, engine, *accumulators)
    if mode == "intra_doc":
        found[PER_DOCUMENT] = _torch_contestant(attention, attention.lengths)
    pairs = attention.plan.num_pairs
    rows = round((math.sqrt(8 * pairs + 1) - 1) / 2)  # n (n + 1) / 2 = pairs
    found[YARDSTICK] = _torch_contestant(attention, [rows])
    return found


def _engine_contestant(
    attention: Attention,
    engine: Engine,
    state: SoftmaxState,
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> Contestant:
    def get_ready() -> Callable[[], Backward]:
        state.out.zero_()
        state.lse.fill_(-math.inf)
        return forward

    def forward() -> Backward:
        attention.forward(engine, state)
        out = state.out.to(attention.q.dtype)
        return partial(attention.backward, engine, out, state.lse, gradients)

    return get_ready


def _torch_contestant(attention: Attention, lengths: Sequence[int]) -> Contestant:
    return lambda: partial(_torch_forward, attention, lengths)


def _torch_forward(attention: Attention, lengths: Sequence[int]) -> Backward:
    parts = []
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        leaves = [
            x[rows].detach().requires_grad_() for x in (attention.q, attention.k, attention.v)
        ]
        parts.append((leaves, causal_call(*leaves), attention.dout[rows]))
        start += length

    def backward() -> None:
        for leaves, out, dout in parts:
            torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return backward


def _time_in_turn(
    contestants: dict[str, Contestant],
    device: torch.device,
    repeats: int,
    failed: Callable[[str, Exception], None] | None = None,
) -> dict[str, tuple[float, float]]:
    """The fastest forward and backward of each; one round first to compile and tune."""
    best = dict.fromkeys(contestants, (math.inf, math.inf))
    for turn in range(repeats + 1):
        for name in list(best):
            try:
                times = _time(contestants[name], device)
            except Exception as error:  # whatever a kernel's compiler or the driver throws
                if failed is None:
                    raise
                del best[name]
                failed(name, error)
                continue
            if turn:
                best[name] = min(best[name][0], times[0]), min(best[name][1], times[1])
    return best


def _time(contestant: Contestant, device: torch.device) -> tuple[float, float]:
    """Seconds of one forward and of its backward."""
    forward = contestant()
    if device.type == "cuda":
        backward = forward()
        in_backward = _seconds_on_gpu(backward, device)
        return _seconds_on_gpu(forward, device), in_backward
    started = time.perf_counter()
    backward = forward()
    between = time.perf_counter()
    backward()
    return between - started, time.perf_counter() - between


def _seconds_on_gpu(call: Callable[[], object], device: torch.device) -> float:
    """The device's seconds for one of several calls in a row, so that it never waits for the host
    to make the next one. What calls add up does not matter."""
    once = _elapsed(call, 1, device)
    calls = min(_MOST_CALLS, int(_GPU_SECONDS / once))
    return _elapsed(call, calls, device) / calls if calls > 1 else once


def _elapsed(call: Callable[[], object], calls: int, device: torch.device) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / 1e3  # it is given in milliseconds


HEADERS = (
    "documents", "mode", "tokens", "", "forward GFLOP/s", "backward GFLOP/s",
    "rate / one causal call",
)  # fmt: skip


def table_rows(results: Sequence[KernelSpeed]) -> list[tuple[str, ...]]:
    """Rows of the printed table."""
    return [
        (
            result.mix,
            result.mode,
            f"{result.tokens:,}",
            result.contestant,
            f"{result.forward_rate:,.0f}",
            f"{result.backward_rate:,.0f}",
            f"{result.over_yardstick:.2f}",
        )
        for result in results
    ]


def kernels_markdown(results: Sequence[KernelSpeed], setting: str, command: str) -> str:
    """The section of docs/benchmarks.md, or of docs/kernels.md for a GPU."""
    return "\n\n".join(
        [
            "## Engines",
            f"Written by `{command}`. {setting} FLOPs of visible pairs over the fastest repeat, "
            "all contestants in turn in one run; the last column compares forward and backward "
            "together with torch's own attention on one causal sequence of equal FLOPs. Engines "
            "add to accumulators made before the clock starts.",
            markdown_table(HEADERS, table_rows(results)),
        ]
    )
