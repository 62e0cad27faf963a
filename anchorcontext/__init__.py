"""Distributed long-context training with AnchorAttention, exact to a single device.

The library face; everything a trainer of your own needs::

    window = Window(input_ids, cu_seqlens, mode="anchor")
    plan = make_plan(window, sp_group)
    local = shard(window, plan)
    enable(model)
    output = model(local.input_ids, position_ids=local.position_ids, use_cache=False, plan=plan)
    whole = unshard(output.logits, plan)

Names are imported when first used, so that the command line starts without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import UserError
    from .model import enable
    from .parallel import LocalShard, Plan, distributed_attention, make_plan, shard, unshard
    from .window import Window

__version__ = "0.1.0"

_HOME = {
    "LocalShard": ".parallel",
    "Plan": ".parallel",
    "UserError": ".errors",
    "Window": ".window",
    "distributed_attention": ".parallel",
    "enable": ".model",
    "make_plan": ".parallel",
    "shard": ".parallel",
    "unshard": ".parallel",
}

__all__ = [
    "LocalShard",
    "Plan",
    "UserError",
    "Window",
    "distributed_attention",
    "enable",
    "make_plan",
    "shard",
    "unshard",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
