"""Numbers in sentences."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """``1 window``, ``2 windows``, ``65,536 windows``; ``plural`` where an s does not make it."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
