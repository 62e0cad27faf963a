"""Tokenizers: train a byte-level BPE, load any Hugging Face tokenizer, choose the anchor."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError
from ..hub import offline_without_hub

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
NUM_BYTES = 256


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE of at most ``vocab_size`` tokens, trained on ``texts``; deterministic.

    Any text can be encoded and comes back unchanged. The tokenizer puts BOS in front by itself,
    because a model trained with the anchor expects it there. A small corpus may not hold enough
    different pairs for ``vocab_size`` tokens; the tokenizer is then smaller.

    Raises:
        UserError: ``vocab_size`` has no room for the bytes and the special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = [BOS, EOS, PAD]
    if vocab_size < NUM_BYTES + len(special):
        raise UserError(
            f"data.train_tokenizer.vocab_size = {vocab_size}: at least "
            f"{NUM_BYTES + len(special)}, one token a byte and {', '.join(special)}"
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer=trainer)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, backend.token_to_id(BOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The Hugging Face tokenizer in ``folder``, or of that hub name.

    Raises:
        UserError: there is no tokenizer, or it cannot be loaded.
    """
    from transformers import AutoTokenizer

    offline_without_hub(str(folder))
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"tokenizer {str(folder)!r}: not a Hugging Face tokenizer folder "
            f"({str(error).splitlines()[0]}); set data.tokenizer to a folder with tokenizer.json"
        ) from error
    return tokenizer


def check_vocabulary(tokenizer_size: int, model_size: int | None) -> None:
    """Refuse a tokenizer whose ids the model's embedding does not have.

    Raises:
        UserError: ``tokenizer_size`` is larger than ``model_size`` (None: not known).
    """
    if model_size is not None and tokenizer_size > model_size:
        raise UserError(
            f"the tokenizer has {tokenizer_size} tokens, the model's vocabulary {model_size}: "
            "token ids would lie outside the embedding; use the model's own tokenizer, or give "
            f"the model vocab_size >= {tokenizer_size}"
        )


def resolve_anchor(tokenizer: PreTrainedTokenizerBase, anchor: str | int) -> int | None:
    """The token id of ``data.anchor``; None for ``"none"``.

    ``"auto"`` is BOS, or EOS for a tokenizer without BOS.

    Raises:
        UserError: the tokenizer has no such token.
    """
    if anchor == "none":
        return None
    if isinstance(anchor, int):
        if not 0 <= anchor < len(tokenizer):
            raise UserError(
                f"data.anchor = {anchor}: the tokenizer has the ids 0 to {len(tokenizer) - 1}"
            )
        return anchor
    candidates = {
        "auto": [tokenizer.bos_token_id, tokenizer.eos_token_id],
        "bos": [tokenizer.bos_token_id],
        "eos": [tokenizer.eos_token_id],
    }
    if anchor not in candidates:
        raise UserError(f"data.anchor = {anchor!r}: must be auto, bos, eos, none or a token id")
    found = [token for token in candidates[anchor] if token is not None]
    if not found:
        names = "neither BOS nor EOS" if anchor == "auto" else f"no {anchor.upper()}"
        raise UserError(
            f"data.anchor = {anchor!r}: the tokenizer has {names}; set data.anchor to another "
            "token's id, or to none"
        )
    return int(found[0])


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A fingerprint of everything that decides which ids a text gets."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    special = repr((tokenizer.bos_token_id, tokenizer.eos_token_id))
    return hashlib.blake2b((rules + special).encode("utf-8"), digest_size=16).hexdigest()
