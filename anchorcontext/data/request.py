"""What ``prepare`` is asked for: equal requests give equal folders, others are told apart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from .sources import Source
from .tokenizer import tokenizer_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..config import Config
    from ..config.sections import DataSection, ModelSection, SourceSection

# What decides the tokens of the documents, and then what decides the windows.
TOKEN_KEYS = ("anchor", "add_eos", "max_document_characters", "on_error")
WINDOW_KEYS = (
    "window_tokens",
    "anchor_copies",
    "packing",
    "upsample",
    "tags",
    "interleave",
    "min_document_tokens",
    "max_windows",
    "shares",
    "validation_fraction",
    "shuffle_documents",
    "seed",
)


def model_vocab_size(model: ModelSection) -> int | None:
    """The configured model's vocabulary, where that is known without loading it."""
    if model.scratch is not None:
        size = model.scratch.get("vocab_size")
        return int(size) if size is not None else None
    file = Path(model.path or "").expanduser() / "config.json"
    if not file.is_file():
        return None
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        size = settings.get("text_config", settings).get("vocab_size")
        return int(size) if size is not None else None
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"model.path = {model.path!r}: its config.json is damaged ({error}); mend it, or give "
            "another folder"
        ) from error


def tokenizer_folder(config: Config) -> str:
    """The folder or hub name of the tokenizer.

    Raises:
        UserError: the config names none.
    """
    folder = config.data.tokenizer or config.model.path
    if folder is None:
        raise UserError(
            "no tokenizer: set data.tokenizer to a tokenizer's folder, or "
            "data.train_tokenizer.vocab_size to train one"
        )
    return folder


def tokens_request(
    data: DataSection, sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, Any]:
    """Everything that decides the documents' tokens; equal requests give equal ones."""
    if tokenizer is not None:
        made_with: Any = tokenizer_digest(tokenizer)
    else:
        assert data.train_tokenizer is not None
        made_with = {"train_vocab_size": data.train_tokenizer.vocab_size}
    keys = ("name", "kind", "pattern", "text_field", "source_field", "tokens_field")
    entries = [
        {**{key: getattr(entry, key) for key in keys}, **source.digest()}
        for entry, source in zip(data.sources, sources, strict=True)
    ]
    options = {key: getattr(data, key) for key in TOKEN_KEYS}
    return {"sources": entries, "tokenizer": made_with, **options}


def windows_request(data: DataSection) -> dict[str, Any]:
    """Everything that decides which tokens make which window."""
    return data.model_dump(mode="json", include=set(WINDOW_KEYS))


def check_apart(path: Path, sources: Sequence[SourceSection]) -> None:
    """Refuse to prepare inside a corpus, or around it.

    Raises:
        UserError: what is being prepared would be read as documents, or the corpus be replaced.
    """
    place = path.resolve()
    for index, source in enumerate(sources):
        if source.path is None:
            continue
        corpus = Path(source.path).expanduser().resolve()
        if corpus.exists() and (place.is_relative_to(corpus) or corpus.is_relative_to(place)):
            raise UserError(
                f"data.path = {str(path)!r} and data.sources[{index}].path = {source.path!r} lie "
                "one in the other: prepared windows would be read as documents, or the corpus be "
                "replaced; choose a data.path beside it"
            )


def check_same(path: Path, made: dict[str, Any], asked: dict[str, Any]) -> None:
    """Refuse a folder that was made for another request.

    Raises:
        UserError: names all that differs.
    """
    different = [
        f"  {key}: was {made.get(key)}, now {asked.get(key)}"
        for key in {**made, **asked}
        if made.get(key) != asked.get(key)
    ]
    if different:
        raise UserError(
            f"data.path = {str(path)!r} holds windows that were made differently:\n"
            + "\n".join(different)
            + "\nprepare with --force to replace them, or choose another data.path"
        )
