"""What benchmarks share: their options, and how they were called."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from anchorcontext.errors import UserError


def markdown_option(page: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``--markdown PATH``, for a benchmark whose section is on ``page``."""
    return click.option(
        "--markdown",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="PATH",
        help=f"Write the table into its section of PATH, {page}.",
    )


def config_words() -> str:
    """The config and its overrides, as this command was given them."""
    given = click.get_current_context().params
    return shlex.join([str(given["config_path"]), *given["overrides"]])


def parse_heads(text: str) -> tuple[int, int]:
    """``8/2`` -> 8 query and 2 key/value heads."""
    parts = text.split("/")
    if len(parts) != 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise UserError(f"--heads {text}: give query/key heads, as in 8/2")
    num_heads, num_kv_heads = map(int, parts)
    if num_heads % num_kv_heads:
        raise UserError(f"--heads {text}: key/value heads must divide query heads, as in 8/2")
    return num_heads, num_kv_heads
