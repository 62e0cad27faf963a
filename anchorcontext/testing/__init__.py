"""Helpers for tests of distributed code: gloo ranks, tiny models, a dense oracle."""

from .distributed import run_distributed

__all__ = ["run_distributed"]
