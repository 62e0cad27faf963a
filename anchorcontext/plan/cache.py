"""Plans by content: equal documents and equal options give the same plan object.

A plan depends on the mode and the documents of its windows, not on their tokens. Its steps hold
what executors derive from them (index tensors on a device), so the same object is worth having in
every epoch, and one that the loader has planned ahead need not be planned again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

from ..window import Window
from .backends import plan_batch
from .batch import BatchPlan

CAPACITY = 16
"""Plans kept, the last ones used; each keeps the windows it was made from."""


class PlanCache:
    """The plans used last; may be asked by several threads at a time."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self._plans: OrderedDict[Hashable, BatchPlan] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._plans)

    def plan(self, windows: Sequence[Window], sp_size: int, **options: Any) -> BatchPlan:
        """As :func:`~anchorcontext.plan.plan_batch`; its ``windows`` may hold other tokens."""
        key = (sp_size, tuple(sorted(options.items())), *map(_content, windows))
        with self._lock:
            if key in self._plans:
                self._plans.move_to_end(key)
                return self._plans[key]
        made = plan_batch(windows, sp_size, **options)
        with self._lock:
            # Of two threads that made it at the same time, the first one's counts.
            plan = self._plans.setdefault(key, made)
            self._plans.move_to_end(key)
            while len(self._plans) > self.capacity:
                self._plans.popitem(last=False)
        return plan

    def reserve(self, count: int) -> None:
        """Keep at least ``count`` plans: those of a step and those made ahead of it."""
        self.capacity = max(self.capacity, count)


def _content(window: Window) -> Hashable:
    """All of a window that a plan depends on."""
    return window.mode, window.cu_seqlens.tobytes(), window.segment_docs.tobytes()


PLANS = PlanCache()
"""The plans of this process."""
