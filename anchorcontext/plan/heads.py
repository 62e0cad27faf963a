"""How the ranks of a ulysses team share the heads."""

from __future__ import annotations

from ..errors import UserError


def check_heads(num_heads: int, num_kv_heads: int, ulysses: int) -> None:
    """Whether ``ulysses`` ranks can share the heads.

    Raises:
        UserError: they cannot; names the counts, the rule and the sizes that work.
    """
    if heads_divide(num_heads, num_kv_heads, ulysses):
        return
    fitting = [n for n in range(1, num_heads + 1) if heads_divide(num_heads, num_kv_heads, n)]
    raise UserError(
        f"ulysses = {ulysses} with {num_heads} query and {num_kv_heads} key/value heads: ulysses "
        "must divide the query heads, and divide the key/value heads or be a multiple of them; use "
        f"one of {fitting}, or exchange ring or gather, which do not split heads"
    )


def heads_divide(num_heads: int, num_kv_heads: int, ulysses: int) -> bool:
    """Whether ``ulysses`` divides the query heads, and divides the key/value heads or is a multiple
    of them."""
    return num_heads % ulysses == 0 and (num_kv_heads % ulysses == 0 or ulysses % num_kv_heads == 0)


def heads_per_rank(num_heads: int, num_kv_heads: int, ulysses: int) -> tuple[int, int]:
    """Query heads and key/value heads of one rank of a team.

    With fewer key/value heads than ranks each of them is held by several ranks.
    """
    return num_heads // ulysses, max(1, num_kv_heads // ulysses)


def kv_heads_of(member: int, num_kv_heads: int, ulysses: int) -> slice:
    """The key/value heads that a member's query heads read."""
    first = member * num_kv_heads // ulysses
    return slice(first, first + max(1, num_kv_heads // ulysses))
