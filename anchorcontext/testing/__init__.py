"""Helpers for tests of distributed code: gloo ranks, tiny models, a dense oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .distributed import run_distributed

__all__ = ["run_distributed"]


def __getattr__(name: str) -> Any:
    """``run_distributed`` needs cloudpickle, which a GPU check without the package has not."""
    if name == "run_distributed":
        from .distributed import run_distributed

        return run_distributed
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
