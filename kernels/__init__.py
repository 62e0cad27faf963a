"""Attention over a tile list on one device: engines, and the numerics they share.

`get_engine` chooses an engine; `interface` says what an engine computes; `merge` combines partial
results and adds the anchor.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import logging
from typing import Protocol

import torch

from anchorcontext.errors import UserError

from .anchored import AnchorKeys, backward_with_anchors_, forward_with_anchors_
from .interface import TILE_COLUMNS, Engine, SoftmaxState, Tiles, accumulator_dtype
from .merge import anchor_backward_, anchor_forward_, lse_for_backward, merge_, merge_rows_
from .rotating import RotatingEngine
from .rotation import Rotation, rotate

__all__ = [
    "ENGINES",
    "TILE_COLUMNS",
    "AnchorKeys",
    "Engine",
    "Rotation",
    "SoftmaxState",
    "Tiles",
    "accumulator_dtype",
    "anchor_backward_",
    "anchor_forward_",
    "backward_with_anchors_",
    "engine_report",
    "forward_with_anchors_",
    "get_engine",
    "lse_for_backward",
    "merge_",
    "merge_rows_",
    "rotate",
]

logger = logging.getLogger("anchorcontext")

# Every engine, the preferred one first, as "module:class" so that only the chosen one is imported.
# A class has `name` and `why_not(device, dtype)`; its module must import without the engine's
# optional dependencies and let `why_not` say which is missing. `auto` takes it on the device types
# in its `auto_devices`, where it has that attribute.
ENGINES: dict[str, str] = {
    "flash_attn": ".varlen:FlashAttnEngine",
    "varlen": ".varlen:VarlenEngine",
    "cpu": ".cpu:CpuEngine",
    "flex": ".flex:FlexEngine",
    "triton": ".triton_engine:TritonEngine",
    "reference": ".reference:ReferenceEngine",
}


class _EngineClass(Protocol):
    exact: bool
    takes_rotation: bool

    def __call__(self) -> Engine: ...

    def why_not(self, device: torch.device, dtype: torch.dtype) -> str | None: ...


def get_engine(
    name: str = "auto",
    *,
    device: torch.device,
    dtype: torch.dtype,
    exact: bool = False,
    rotates: bool = False,
) -> Engine:
    """The engine that computes attention on ``device`` for queries and keys of ``dtype``.

    Args:
        name: a key of `ENGINES`, or ``auto``: the first of them that can serve. What ``auto``
            chose, and why, is logged once per device and dtype.
        device: where q, k and v live.
        dtype: dtype of q, k and v.
        exact: whether it must serve exact tile lists (`Tiles`).
        rotates: whether queries and keys come unrotated, with a `Rotation`. ``auto`` then prefers
            an engine that rotates in its kernel; any other that serves fp32 is given rotated
            copies (`RotatingEngine`).

    Raises:
        UserError: the name is unknown, or the engine cannot serve the device or dtype.
    """
    device = torch.device(device)
    if name == "auto":
        name = _choose(device, dtype, exact, rotates)
    elif name not in ENGINES:
        close = difflib.get_close_matches(name, ["auto", *ENGINES], n=1)
        hint = f"did you mean {close[0]!r}?" if close else "use 'auto' to let the device decide."
        known = ", ".join(["auto", *ENGINES])
        raise UserError(f"unknown attention engine {name!r}: it must be one of {known}; {hint}")
    report = engine_report(device, dtype, exact, rotates)
    if report[name] is not None:
        able = [other for other, why in report.items() if why is None]
        fix = f"use 'auto' or {', '.join(able)}" if able else _no_engine_fix(exact)
        raise UserError(
            f"attention engine {name!r} cannot serve {dtype} on {device.type}: {report[name]}; "
            f"{fix}."
        )
    engine = _engine_class(name)()
    return RotatingEngine(engine) if rotates and not engine.takes_rotation else engine


def engine_report(
    device: torch.device, dtype: torch.dtype, exact: bool = False, rotates: bool = False
) -> dict[str, str | None]:
    """For every engine: why it cannot serve ``device`` and ``dtype``, or None when it can."""
    return {name: _why_not(_engine_class(name), device, dtype, exact, rotates) for name in ENGINES}


def _why_not(
    engine: _EngineClass, device: torch.device, dtype: torch.dtype, exact: bool, rotates: bool
) -> str | None:
    if exact and not engine.exact:
        return "it has no exact setting"
    reason = engine.why_not(device, dtype)
    if reason is None and rotates and not engine.takes_rotation:
        turned = accumulator_dtype(dtype)
        reason = engine.why_not(device, turned)
        if reason is not None:
            reason = f"queries and keys are rotated to {turned}, and {reason}"
    return reason


def _no_engine_fix(exact: bool) -> str:
    return "leave exact out" if exact else "use a floating-point dtype"


@functools.cache
def _choose(device: torch.device, dtype: torch.dtype, exact: bool, rotates: bool) -> str:
    passed_over: list[str] = []
    report = engine_report(device, dtype, exact, rotates)
    # Where queries and keys come unrotated, an engine that rotates by itself spares three copies.
    preferred = sorted(ENGINES, key=lambda name: rotates and not _engine_class(name).takes_rotation)
    for name in preferred:
        reason = report[name]
        devices = getattr(_engine_class(name), "auto_devices", (device.type,))
        if reason is None and device.type not in devices:
            reason = f"on {device.type} tensors it is chosen by name only"
        if reason is None:
            why = "; ".join(passed_over) or "the fastest one for this device"
            logger.info("attention engine %r for %s on %s (%s)", name, dtype, device.type, why)
            return name
        passed_over.append(f"not {name!r}: {reason}")
    raise UserError(
        f"no attention engine serves {dtype} on {device.type} ({'; '.join(passed_over)}); "
        f"{_no_engine_fix(exact)}."
    )


def _engine_class(name: str) -> _EngineClass:
    module, attribute = ENGINES[name].split(":")
    return getattr(importlib.import_module(module, __package__), attribute)
