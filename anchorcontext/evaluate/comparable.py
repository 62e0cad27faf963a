"""Whether losses of several runs are of the same tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..data.store import TOKENIZER

Flat = dict[str, Any]
"""A config: dotted key -> value."""

OTHER_TOKENIZERS = (
    "the tokenizers differ: a token of one holds more text than a token of another, so losses per "
    "token (training, held out, by position) say nothing between these runs; scores of tasks do"
)
OTHER_WINDOWS = (
    "windows differ in {}: losses of these runs are not of the same tokens; `evaluate --tasks "
    "loss-by-position --documents PATH` reads the same texts with all of them"
)
# Where windows lie and how they are made, not what is in them; the order in which they are read.
_NOT_CONTENT = ("path", "workers", "on_error", "shuffle", "tokenizer", "train_tokenizer")


def loss_warnings(configs: Sequence[Flat]) -> list[str]:
    """Why losses of runs with these configs cannot be compared, a sentence a reason."""
    if not all(configs):  # one that cannot be read says nothing
        return []
    found = []
    if _differ(_tokenizers(configs)):
        found.append(OTHER_TOKENIZERS)
    names = {key.split(".")[1] for config in configs for key in config if key.startswith("data.")}
    parts = (f"data.{name}" for name in sorted(names.difference(_NOT_CONTENT)))
    keys = [part for part in parts if _differ([_section(config, part) for config in configs])]
    if keys:
        found.append(OTHER_WINDOWS.format(", ".join(keys)))
    return found


def _tokenizers(configs: Sequence[Flat]) -> list[Any]:
    """What tells the tokenizers apart: their files where all are here, else the configs."""
    files = [_tokenizer_digest(config) for config in configs]
    return files if all(files) else [_named_tokenizer(config) for config in configs]


def _tokenizer_digest(config: Flat) -> str | None:
    path = config.get("data.path")
    prepared = Path(path) / TOKENIZER if path else None
    for folder in (prepared, config.get("data.tokenizer"), config.get("model.path")):
        if folder is not None and (file := Path(folder) / "tokenizer.json").is_file():
            return hashlib.blake2b(file.read_bytes()).hexdigest()
    return None


def _named_tokenizer(config: Flat) -> Any:
    trained = _section(config, "data.train_tokenizer")
    if any(value is not None for value in trained.values()):
        return trained, config.get("data.sources")
    return config.get("data.tokenizer") or config.get("model.path")


def _section(config: Flat, name: str) -> Flat:
    """A key, or all keys of a section."""
    return {k: v for k, v in config.items() if k == name or k.startswith(f"{name}.")}


def _differ(values: Sequence[Any]) -> bool:
    return any(value != values[0] for value in values)
