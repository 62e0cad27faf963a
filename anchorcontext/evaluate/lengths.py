"""Lengths in tokens, as they are typed and shown."""

from __future__ import annotations

import re

from ..errors import UserError

SMALLEST_LENGTH = 256


def parse_lengths(asked: str) -> list[int]:
    """Lengths in tokens from ``4096,8K,4000``, ascending; K is 1,024.

    Raises:
        UserError: not a number, or shorter than any task's prompt.
    """
    lengths = set()
    for part in filter(None, (part.strip() for part in asked.split(","))):
        match = re.fullmatch(r"(\d[\d_]*)([kK]?)", part)
        if match is None:
            raise UserError(f"--lengths {part!r}: a number of tokens, such as 4096, 4000 or 4K")
        length = int(match[1]) * (1024 if match[2] else 1)
        if length < SMALLEST_LENGTH:
            raise UserError(
                f"--lengths {part}: no task's prompt and answer fit {length} tokens; ask for at "
                f"least {SMALLEST_LENGTH}, of which some tasks need more"
            )
        lengths.add(length)
    if not lengths:
        raise UserError("--lengths: name at least one, such as 4096")
    return sorted(lengths)


def length_label(length: int) -> str:
    """``4K`` for 4,096 tokens, ``4,000`` for 4,000: the two are not the same test."""
    return f"{length // 1024}K" if length % 1024 == 0 else f"{length:,}"
