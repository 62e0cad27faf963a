"""One number hidden in a haystack, found or not, without generating a token.

Greedy decoding writes an answer exactly when every token of it has the largest logit given those
before it. So one forward over prompt *and* answer decides, with the training attention core, for
any number of ranks and ZeRO stage: no cache, no loop. It is stricter than a search of the answer in
generated text, as RULER's NIAH single (arXiv 2404.06654) scores it, for a model that first says
something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..data.draws import draw
from ..errors import UserError
from .probes import NOT_COUNTED, Excerpt, Probe, packed_alone
from .tally import Tally

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAMES = ("amber", "basalt", "cobalt", "dahlia", "ember", "fennel", "garnet", "hazel")
NEEDLE = "\nThe secret number of {name} is {number}.\n"
QUESTION = (
    "\nWhat is the secret number of {name} that the text above mentions?"
    " The secret number of {name} is"
)
ANSWER = " {number}"
FILLER = (
    "The road went on between the fields. A cart came by, and after it another one. Nobody spoke. "
    "In the evening there was rain, and in the morning the road was dry again.\n"
)


def needle_excerpts(
    tokenizer: PreTrainedTokenizerBase,
    lengths: Sequence[int],
    *,
    samples: int,
    bos: int | None,
    haystack: np.ndarray | None = None,
    seed: int = 0,
) -> list[list[Excerpt]]:
    """``samples`` prompts with their answers of each length; sample i of length l counts to group
    ``l * samples + i``.

    Depths are spread evenly from the beginning to the end of the haystack; name, number and the
    haystack's beginning are drawn from (seed, length, sample).

    Args:
        tokenizer: the model's; its own special tokens are left out.
        lengths: tokens of prompt and answer, BOS included; met exactly.
        bos: token in front of every prompt.
        haystack: int64 tokens to hide the needle in, repeated where they are too few; default: a
            text of ours, over and over.

    Raises:
        UserError: a length that has no room for the needle and the question.
    """
    hay = _encode(tokenizer, FILLER) if haystack is None or not len(haystack) else haystack
    return [
        [
            _excerpt(
                tokenizer, length, group * samples + i, i / max(samples - 1, 1), bos, hay, drawn
            )
            for i, drawn in enumerate(_draws(seed, length, samples))
        ]
        for group, length in enumerate(lengths)
    ]


def needle_probes(excerpts: Sequence[Sequence[Excerpt]], window_tokens: int) -> list[Probe]:
    """The prompts, packed side by side: each is read as if alone."""
    return packed_alone([each for same in excerpts for each in same], window_tokens)


def hit_rates(found: Tally, lengths: Sequence[int], samples: int) -> dict[int, float]:
    """Share of prompts whose every answer token has the largest logit, by length."""
    complete = (found.hits == found.targets).reshape(len(lengths), samples)
    return {length: float(hits.mean()) for length, hits in zip(lengths, complete, strict=True)}


def _draws(seed: int, length: int, samples: int) -> np.ndarray:
    """(samples, 3) uint64, a function of the arguments alone."""
    rows, columns = np.arange(samples)[:, None], np.arange(3)[None]
    return draw(seed, "needles", length, rows, columns)


def _excerpt(
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    group: int,
    depth: float,
    bos: int | None,
    hay: np.ndarray,
    drawn: np.ndarray,
) -> Excerpt:
    words = {
        "name": NAMES[int(drawn[0] % np.uint64(len(NAMES)))],
        "number": 1_000_000 + int(drawn[1] % np.uint64(9_000_000)),
    }
    front = np.array([] if bos is None else [bos], dtype=np.int64)
    needle = _encode(tokenizer, NEEDLE.format(**words))
    question = _encode(tokenizer, QUESTION.format(**words))
    # Together, as a text is tokenised: the answer is what the question alone does not have.
    asked = _encode(tokenizer, (QUESTION + ANSWER).format(**words))
    differ = question[: len(asked)] != asked[: len(question)]
    answer = int(np.argmax(differ)) if differ.any() else len(question)
    room = length - len(front) - len(needle) - len(asked)
    if room < 0:
        raise UserError(
            f"a context of {length} tokens has no room for the needle and its question, "
            f"{length - room} tokens: set evaluate.lengths to at least that"
        )
    begin = int(drawn[2] % np.uint64(len(hay)))
    text = np.resize(np.roll(hay, -begin), room)
    cut = round(depth * room)
    ids = np.concatenate([front, text[:cut], needle, text[cut:], asked])
    groups = np.full(length, NOT_COUNTED)
    groups[length - len(asked) + answer :] = group
    return Excerpt(ids, groups)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> np.ndarray:
    return np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)
