"""RULER's two scores, in percent, as its paper and its own code define them.

The harness (0.4.13) computes the first the same way, but takes a bare string for a list of its
characters. Its second differs: it takes the *share* of an answer's references that occur, where
RULER asks whether *any* of them does (SQuAD lists the same answer several times, in spellings of
which a model writes one), and the best sample instead of the mean over samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...errors import UserError
from ...words import counted


def string_match_all(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """The mean share of each answer's references that occur in it, case ignored, times 100.

    Raises:
        UserError: a bare string where a list belongs, or no references.
    """
    return _mean(predictions, references, lambda hits: sum(hits) / len(hits))


def string_match_part(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """The share of answers in which at least one of their references occurs, times 100.

    Raises:
        UserError: a bare string where a list belongs, or no references.
    """
    return _mean(predictions, references, lambda hits: float(any(hits)))


SCORES = {"all": string_match_all, "part": string_match_part}


def _mean(
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    of_hits: Callable[[list[bool]], float],
) -> float:
    _check_lists(predictions, references)
    scores = [
        of_hits([reference.lower() in answer.lower() for reference in wanted])
        for answer, wanted in zip(predictions, references, strict=True)
    ]
    return 100 * sum(scores) / len(scores)


def _check_lists(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    for name, value in [("predictions", predictions), ("references", references)]:
        if isinstance(value, str):
            raise UserError(f"{name} = {value!r}: a list, one entry a sample; put it in brackets")
    if len(predictions) != len(references) or not predictions:
        raise UserError(
            f"{counted(len(predictions), 'prediction')} and "
            f"{counted(len(references), 'reference')}: one or more, and as many of the "
            "one as of the other"
        )
    for wanted in references:
        if isinstance(wanted, str) or not wanted:
            raise UserError(
                f"references of one sample = {wanted!r}: a list of one or more texts; a bare "
                "string would be matched letter by letter"
            )
