"""What several diagnoses refuse before they measure."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PreTrainedConfig

from ..errors import UserError
from .models import trained_length


def at_least(option: str, numbers: Iterable[int], least: int) -> tuple[int, ...]:
    """The numbers of a command's ``option`` in order, each once.

    Raises:
        UserError: there are none, or one is below ``least``.
    """
    ordered = tuple(sorted(set(numbers)))
    if not ordered or ordered[0] < least:
        given = ordered[0] if ordered else "nothing"
        raise UserError(f"{option} {given}: give whole numbers from {least} on")
    return ordered


def check_reach(
    model: str,
    config: PreTrainedConfig,
    tokens: int,
    shift: int,
    *,
    fix: str,
    extrapolate: bool = False,
) -> None:
    """Refuse positions past the length that the model was trained on.

    Args:
        model, config: its folder, and :func:`~.models.read_config` of it.
        tokens, shift: of the furthest forward.
        fix: what to do about it.
        extrapolate: allow it, unless the RoPE would then be another one.

    Raises:
        UserError: positions reach too far.
    """
    own = trained_length(model)
    if own is None or tokens + shift <= own:
        return
    if extrapolate:
        rope = config.get_text_config().rope_parameters or {}
        if rope.get("rope_type") != "dynamic":
            return
        fix = "its RoPE of type dynamic would change there: measure shorter ones"
    raise UserError(
        f"{tokens:,} tokens shifted by {shift:,} need positions up to {tokens + shift - 1:,}; "
        f"{model} was trained on {own:,}, up to {own - 1:,} (max_position_embeddings): {fix}"
    )
