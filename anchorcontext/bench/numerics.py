"""How far each engine is from fp64: output, LSE and gradients, by dtype and length.

Inputs are drawn in fp64 and rounded to the dtype; the oracle is our ``cpu`` engine in fp64 on the
rounded inputs, itself checked against dense autograd by the tests. What is compared is what a model
gets: output and gradients in the dtype. Beside the engines stands torch's own attention in one
call, where it has one for the function: mode ``full``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from anchorcontext.kernels import engine_report, get_engine

from ..markdown import markdown_table
from .attention import Attention, causal_call

TORCH = "torch, one call"
MODES = ("full", "anchor")
# A dense engine holds N x M scores a head.
REFERENCE_TOKENS = 4096
QUANTITIES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class EngineErrors:
    """One engine on one window: relative errors (norm over norm) and the LSE's largest error."""

    mode: str
    tokens: int
    dtype: str
    engine: str
    out: float
    lse: float
    dq: float
    dk: float
    dv: float


def bench_numerics(
    *,
    lengths: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    heads: tuple[int, int] = (2, 1),
    head_dim: int = 64,
    engines: Sequence[str] | None = None,
    seed: int = 0,
    exact_results: dict[tuple, dict[str, torch.Tensor]] | None = None,
) -> Iterator[EngineErrors]:
    """Every engine that can serve (or those named), and torch's own call, at every length, mode and
    dtype. Calls that differ in nothing but ``engines`` may share ``exact_results``: what fp64 gave.
    """
    exact_results = {} if exact_results is None else exact_results
    for tokens in lengths:
        for mode in MODES:
            drawn = Attention.draw(mode, tokens, heads=heads, head_dim=head_dim, seed=seed)
            for dtype in dtypes:
                rounded = drawn.to("cpu", dtype)
                key = mode, tokens, dtype
                if key not in exact_results:
                    exact_results[key] = _results(rounded.to("cpu", torch.float64), "cpu")
                here = rounded.to(device, dtype)
                for name, compute in _contestants(here, mode, engines).items():
                    yield EngineErrors(
                        mode,
                        tokens,
                        str(dtype).removeprefix("torch."),
                        name,
                        **_errors(compute(), exact_results[key]),
                    )


def _contestants(
    attention: Attention, mode: str, engines: Sequence[str] | None
) -> dict[str, Callable[[], dict[str, torch.Tensor]]]:
    found: dict[str, Callable[[], dict[str, torch.Tensor]]] = {}
    report = engine_report(attention.q.device, attention.q.dtype)
    for name, reason in report.items():
        dense = name == "reference" and len(attention.q) > REFERENCE_TOKENS
        if reason is None and not dense and (engines is None or name in engines):
            found[name] = partial(_results, attention, name)
    if mode == "full":
        found[TORCH] = partial(_torch_results, attention)
    return found


def _results(attention: Attention, name: str) -> dict[str, torch.Tensor]:
    q = attention.q
    engine = get_engine(name, device=q.device, dtype=q.dtype)
    state = attention.forward(engine)
    out = state.out.to(q.dtype)
    grads = attention.backward(engine, out, state.lse)
    dq, dk, dv = (grad.to(q.dtype) for grad in grads)
    return {"out": out, "lse": state.lse, "dq": dq, "dk": dk, "dv": dv}


def _torch_results(attention: Attention) -> dict[str, torch.Tensor]:
    """The whole window as one causal sequence; torch does not return the LSE."""
    leaves = [x.detach().requires_grad_() for x in (attention.q, attention.k, attention.v)]
    out = causal_call(*leaves)
    grads = torch.autograd.grad(out, leaves, attention.dout)
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def _errors(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    errors = {}
    for name in QUANTITIES:
        if name not in found:
            errors[name] = math.nan
            continue
        difference = found[name].double().cpu() - exact[name]
        errors[name] = (
            difference.abs().max() if name == "lse" else difference.norm() / exact[name].norm()
        ).item()
    return errors


HEADERS = ("mode", "tokens", "dtype", "engine", *QUANTITIES)


def table_rows(results: Sequence[EngineErrors]) -> list[tuple[str, ...]]:
    """Rows of the printed table."""
    return [
        (
            result.mode,
            f"{result.tokens:,}",
            result.dtype,
            result.engine,
            *(_shown(getattr(result, name)) for name in QUANTITIES),
        )
        for result in results
    ]


def numerics_markdown(results: Sequence[EngineErrors], setting: str, command: str) -> str:
    """The section of docs/kernels.md."""
    return "\n\n".join(
        [
            "## Errors against fp64",
            f"Written by `{command}`. {setting} Output and gradients: norm of the error over norm "
            "of the value, as a model gets them, in the dtype; LSE: largest error. Normal inputs, "
            "documents of the slimpajama mix.",
            markdown_table(HEADERS, table_rows(results)),
        ]
    )


def _shown(error: float) -> str:
    return "" if math.isnan(error) else f"{error:.1e}"
