"""Numbers and times in sentences."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """``1 window``, ``2 windows``, ``65,536 windows``; ``plural`` where an s does not make it."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def duration(seconds: float | None) -> str:
    """``hours:minutes:seconds``; ``-`` for None."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def time_left(seconds: float, done: float, total: float) -> str:
    """How long the rest of ``total`` may take, when ``done`` of it took ``seconds``."""
    return f"about {duration(seconds * (total / done - 1))} left"
