"""Backend ``ring_flash_attn``: the package ring-flash-attn 0.1.8, unmodified, under our plan.

The plan (:mod:`anchorcontext.plan.ring_flash_attn`) says which of the package's functions serves a
micro-batch and lays the tokens out for it; this file hands it the shards. Communication, merging
and gradients are the package's own, through its autograd functions; it calls flash-attn, so that
all of it needs CUDA (tests: :mod:`anchorcontext.testing.flash_attn_cpu`).

Legend: B windows, S local tokens of each, H heads, D head dimension.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UserError
from ..plan.ring_flash_attn import (
    INSTEAD,
    LLAMA3_VARLEN,
    RING,
    ZIGZAG_RING,
    ZIGZAG_RING_VARLEN,
    RingFlashAttnPlan,
)

if TYPE_CHECKING:
    from .plan import Plan

PACKAGE = "ring_flash_attn"
INSTALL = {
    PACKAGE: "pip install --no-deps ring-flash-attn==0.1.8",
    "flash_attn": "pip install --no-build-isolation flash-attn, which needs CUDA",
}
MOST_HEAD_DIM = 256
HEADS_A_GATHER = 1
"""Key/value heads that llama3's function gathers at a time (its ``heads_k_stride``): one travels
while the one before is computed."""


def check_request(engine: str, overlap: bool) -> None:
    """Raise a `UserError` where the package is not installed or has no such choice."""
    if engine != "auto" or not overlap:
        asked = f"engine {engine!r}" if engine != "auto" else "overlap False"
        raise UserError(
            f"{asked}: with attention.backend ring_flash_attn flash-attn computes, while the next "
            f"keys travel; leave it out, or {INSTEAD}"
        )
    check_installed()


def check_installed() -> None:
    """Raise a `UserError` with the line to install where the package or flash-attn is missing."""
    for package, line in INSTALL.items():
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"attention.backend ring_flash_attn: {package} is not installed; {line}; or "
                f"{INSTEAD}"
            )


def load_submodule(name: str) -> types.ModuleType:
    """``ring_flash_attn.<name>`` without the package's ``__init__``.

    That also imports an adapter, which looks for functions that transformers 5 no longer has. The
    stand-in that takes the package's place for the import is gone afterwards.

    Raises:
        UserError: ring-flash-attn or flash-attn is not installed.
    """
    full_name = f"{PACKAGE}.{name}"
    if full_name in sys.modules:
        return sys.modules[full_name]
    check_installed()
    if PACKAGE in sys.modules:
        return importlib.import_module(full_name)
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    try:
        return importlib.import_module(full_name)
    finally:
        del sys.modules[PACKAGE]


def ring_flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, scale: float
) -> torch.Tensor:
    """Attention of this rank's queries by the package; differentiable.

    Bytes are counted in ``plan.meter``, in closed form; seconds are not: the package computes and
    waits in one call.

    Args:
        q: (B, Hq, S, D); k, v: (B, Hkv, S, D), checked against the plan.
        plan: one whose data is a `RingFlashAttnPlan`.
        scale: multiplies the dot products.

    Returns:
        (B, Hq, S, D) in q's dtype; zero on padding.

    Raises:
        UserError: a dtype, head dimension or device that the package would compute wrongly or not
            at all.
    """
    data = plan.data
    assert isinstance(data, RingFlashAttnPlan)
    _check(q, data)
    tokens_first = [x.transpose(1, 2) for x in (q, k, v)]
    with torch.autocast(q.device.type, enabled=False):
        out = FUNCTIONS[data.algorithm.name](*tokens_first, plan, data, scale)
    out = out.transpose(1, 2)
    padding = _padding(plan, data, out.device)
    if padding is not None:
        out = out.masked_fill(padding[:, None, :, None], 0)
    _count_bytes(q, k, out, plan)
    return out


def _ring(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    data: RingFlashAttnPlan,
    scale: float,
) -> torch.Tensor:
    function = load_submodule("ring_flash_attn").ring_flash_attn_func
    return function(q, k, v, **_options(plan, scale))


def _zigzag_ring(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    data: RingFlashAttnPlan,
    scale: float,
) -> torch.Tensor:
    function = load_submodule("zigzag_ring_flash_attn").zigzag_ring_flash_attn_func
    return function(q, k, v, **_options(plan, scale))


def _zigzag_ring_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    data: RingFlashAttnPlan,
    scale: float,
) -> torch.Tensor:
    """The documents of all windows in one call: a rank holds 1/P of each of them."""
    module = load_submodule("zigzag_ring_flash_attn_varlen")
    key = ("edges", q.device)
    if key not in data.cache:
        # Windows are all padded to one length, so local edges go on where the last ones end.
        edges = [
            torch.as_tensor(data.sequence_edges(i)) // data.sp_size + i * data.local_length
            for i in range(data.batch_size)
        ]
        whole = torch.cat(edges).unique().to(torch.int32)
        data.cache[key] = whole.to(q.device), int(whole.diff().max())
    edges, longest = data.cache[key]
    q_rows, k_rows, v_rows = (x.flatten(0, 1) for x in (q, k, v))
    out = module.zigzag_ring_flash_attn_varlen_func(
        *(q_rows, k_rows, v_rows, edges, longest),
        **_options(plan, scale),
    )
    return out.unflatten(0, q.shape[:2])


def _llama3_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    data: RingFlashAttnPlan,
    scale: float,
) -> torch.Tensor:
    """Window by window: the function takes ranks that hold one interval of a packed sequence."""
    module = load_submodule("llama3_flash_attn_varlen")
    outs = []
    for index in range(data.batch_size):
        key = ("slices", plan.sp_rank, index, q.device)
        if key not in data.cache:
            edges = torch.as_tensor(data.sequence_edges(index)).to(torch.int32)
            *cu_seqlens, longest_q, longest_k, keys = module.llama3_flash_attn_prepare_cu_seqlens(
                edges, True, plan.sp_rank, plan.sp_size
            )
            on_device = [x.to(q.device) for x in cu_seqlens]
            data.cache[key] = (*on_device, longest_q, longest_k, HEADS_A_GATHER, keys)
        out = module.llama3_flash_attn_varlen_func(
            *(q[index], k[index], v[index], *data.cache[key]),
            **_options(plan, scale),
        )
        outs.append(out)
    return torch.stack(outs)


FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    RING.name: _ring,
    ZIGZAG_RING.name: _zigzag_ring,
    ZIGZAG_RING_VARLEN.name: _zigzag_ring_varlen,
    LLAMA3_VARLEN.name: _llama3_varlen,
}


def _options(plan: Plan, scale: float) -> dict[str, Any]:
    """What all of the package's functions are called with."""
    return {
        "softmax_scale": scale,
        "causal": True,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "group": plan.group,
    }


def _check(q: torch.Tensor, data: RingFlashAttnPlan) -> None:
    check_installed()
    served = getattr(importlib.import_module("flash_attn"), "device_type", "cuda")
    if q.device.type != served:
        raise UserError(
            f"q is on {q.device}: flash_attn, which attention.backend ring_flash_attn calls, "
            f"computes on {served}; {INSTEAD}"
        )
    name, algorithm = str(q.dtype).removeprefix("torch."), data.algorithm
    able = [d for d in algorithm.dtypes if served == "cpu" or d in ("bfloat16", "float16")]
    if name not in able:
        raise UserError(
            f"q is {name}: ring-flash-attn's {algorithm.name} gives right gradients on {served} "
            f"for {', '.join(able)} alone; set model.dtype bf16, or {INSTEAD}"
        )
    if q.shape[-1] % 8 or q.shape[-1] > MOST_HEAD_DIM:
        raise UserError(
            f"head dimension {q.shape[-1]}: flash-attn's functions take multiples of 8 up to "
            f"{MOST_HEAD_DIM}; {INSTEAD}"
        )


def _padding(plan: Plan, data: RingFlashAttnPlan, device: torch.device) -> torch.Tensor | None:
    """bool (B, S): this rank's padding; None without any."""
    key = ("padding", plan.sp_rank, device)
    if key not in data.cache:
        padding = torch.from_numpy(data.padding(plan.sp_rank))
        data.cache[key] = padding.to(device) if bool(padding.any()) else None
    return data.cache[key]


def _count_bytes(q: torch.Tensor, k: torch.Tensor, out: torch.Tensor, plan: Plan) -> None:
    """Count what this forward sent, and its backward when it comes."""

    def sent(forwards: int, backwards: int) -> int:
        return plan.data.bytes_sent(
            plan.sp_rank,
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=q.shape[3],
            element_size=q.element_size(),
            forwards=forwards,
            backwards=backwards,
        )

    def count_backward(_: torch.Tensor) -> None:
        plan.meter.bytes_sent += sent(0, 1)

    plan.meter.bytes_sent += sent(1, 0)
    if out.requires_grad:
        out.register_hook(count_backward)
