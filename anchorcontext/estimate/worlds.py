"""Which numbers of ranks a recipe can be planned for; the model's heads are looked at later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import UserError

if TYPE_CHECKING:
    from ..config import Config

MOST_RANKS = 1024


def dividing_sp(config: Config, world_size: int) -> list[int]:
    """The values of parallel.sp on ``world_size`` ranks over which the windows of a step divide.

    Raises:
        UserError: there is none, or the world is larger than 1024.
    """
    if not 1 <= world_size <= MOST_RANKS:
        raise UserError(f"--world {world_size}: plans are made for 1 to {MOST_RANKS} ranks")
    values = [sp for sp in range(1, world_size + 1) if _divides(config, world_size, sp)]
    if not values:
        raise no_sp(config, world_size, "")
    return values


def no_sp(config: Config, world_size: int, heads: str) -> UserError:
    """That no parallel.sp fits; ``heads``: what else stands in the way."""
    return UserError(
        f"--world {world_size}: no parallel.sp fits train.windows_per_step = "
        f"{config.train.windows_per_step}, train.micro_batch_windows = "
        f"{config.train.micro_batch_windows}, attention.exchange = {config.attention.exchange}"
        f"{heads}; change one of them"
    )


def ulysses_on(config: Config, sp: int) -> int:
    """attention.ulysses of the config on sp ranks: with ``ulysses`` all of them swap heads."""
    return 1 if config.attention.exchange == "ulysses" else config.attention.ulysses


def _divides(config: Config, world_size: int, sp: int) -> bool:
    train, attention = config.train, config.attention
    if world_size % sp or train.windows_per_step % (world_size // sp * train.micro_batch_windows):
        return False
    if sp == 1 and attention.backend != "native":
        return False
    ulysses = ulysses_on(config, sp)
    return sp % ulysses == 0 and (attention.exchange != "hybrid" or 1 < ulysses < sp)
