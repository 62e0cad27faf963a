"""The arms of ``diagnose first-token``: what the first token is, where it stands, who moves.

=============  =================================================================================
plain          BOS first; all positions shift. Beside it, from the same forwards, ``excluded``:
               nobody sees the first token, probabilities of the others renormalised
clamped        the first position stays 0 while all others shift: distances to it do change, so
               D is not zero in exact arithmetic either
gap:N          all other tokens stand N positions further from the first one; all shift
moved:K        BOS stands at index K of the text and not in front; all shift
token:NAME     another token first: eos, frequent (the text's most frequent one), random, none (the
               text's own next token), or an id
=============  =================================================================================
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from ...errors import UserError

TOKENS = ("eos", "frequent", "random", "none")
PLAIN, EXCLUDED = "plain", "excluded"


@dataclass(frozen=True)
class Arm:
    """One arm on one text.

    Attributes:
        name: as given.
        ids: (T,) int64.
        positions: (2, T) int64 at the reference shift and at the other one.
        spots: key columns to report by name: "first", and "bos" where BOS is elsewhere.
    """

    name: str
    ids: torch.Tensor
    positions: torch.Tensor
    spots: dict[str, int]


@dataclass(frozen=True)
class Vocabulary:
    """What arms need to know of a tokenizer: its size, EOS if there is one, and special ids."""

    size: int
    eos: int | None
    special: frozenset[int]


def check_arm(name: str, tokens: int, vocabulary: Vocabulary) -> str:
    """``name``, an arm that can be made of texts of ``tokens`` tokens.

    Raises:
        UserError: there is no such arm, or the tokenizer has no such token.
    """
    kind, _, value = name.strip().partition(":")
    number = int(value) if value.isdigit() else None
    if kind in (PLAIN, "clamped") and not value:
        return kind
    if kind == "gap" and number:
        return f"gap:{number}"
    if kind == "moved" and number:
        if number < tokens:
            return f"moved:{number}"
        raise UserError(f"arm {name}: the texts have {tokens} tokens; give an index below that")
    if kind == "token" and (value in TOKENS or number is not None):
        if value == "eos" and vocabulary.eos is None:
            raise UserError(f"arm {name}: the tokenizer has no EOS; leave the arm out")
        if number is not None and number >= vocabulary.size:
            raise UserError(f"arm {name}: the tokenizer has the ids 0 to {vocabulary.size - 1}")
        return f"token:{value}"
    raise UserError(
        f"arm {name!r}: give plain, clamped, gap:N, moved:K, or token: with an id or one of "
        f"{', '.join(TOKENS)}"
    )


def make_arm(
    name: str,
    text: torch.Tensor,
    *,
    shifts: tuple[int, int],
    vocabulary: Vocabulary,
    seed: int = 0,
) -> Arm:
    """The arm ``name`` of a text (T + 1,): BOS and the tokens that follow.

    Args:
        shifts: the reference's and the other one's.
        seed: of the random token.
    """
    kind, _, value = name.partition(":")
    ids = text[:-1].clone()
    places = torch.arange(len(ids))
    spots = {"first": 0}
    if kind == "gap":
        places[1:] += int(value)
    elif kind == "moved":
        index = int(value)
        ids = torch.cat((ids[1 : index + 1], ids[:1], ids[index + 1 :]))
        spots["bos"] = index
    elif kind == "token" and value == "none":
        ids = text[1:].clone()
    elif kind == "token":
        ids[0] = first_token(value, ids, vocabulary, seed)
    positions = torch.stack([places + shift for shift in shifts])
    if kind == "clamped":
        positions[:, 0] = 0
    return Arm(name, ids, positions, spots)


def first_token(value: str, ids: torch.Tensor, vocabulary: Vocabulary, seed: int) -> int:
    """The id that ``token:value`` puts first in a text whose tokens are ``ids``."""
    if value.isdigit():
        return int(value)
    if value == "eos":
        assert vocabulary.eos is not None
        return vocabulary.eos
    if value == "frequent":
        counts = Counter(i for i in ids[1:].tolist() if i not in vocabulary.special)
        return min(counts, key=lambda token: (-counts[token], token))
    generator = torch.Generator().manual_seed(seed)
    while True:
        token = int(torch.randint(vocabulary.size, (), generator=generator))
        if token not in vocabulary.special:
            return token
