"""Keep secrets out of what is written: configs, events, run metadata."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

REDACTED = "[redacted]"

_SECRET_WORDS = {
    "apikey",
    "auth",
    "authorization",
    "credential",
    "credentials",
    "key",
    "passwd",
    "password",
    "secret",
    "secrets",
    "token",
}
# These name vocabulary entries, not credentials.
_VOCABULARY_TOKENS = re.compile(r"^(bos|eos|pad|unk|sep|cls|mask|anchor|image)_token$")
_SECRET_VALUES = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|AKIA[A-Z0-9]{16})"
)
_URL_PASSWORD = re.compile(r"(\w+://[^/\s:@]*):[^/\s@]+@")
_SHORTEST_SECRET = 8


def redact(value: Any, name: str = "") -> Any:
    """A copy of ``value`` (mappings, sequences, scalars) without secrets.

    Text is replaced when its key reads like a secret (``hf_token``, ``api_key``, ``password``; but
    not ``window_tokens`` or ``num_key_value_heads``), when it looks like a well-known access
    token, and wherever it repeats the value of an environment variable with a secret's name.
    """
    return _redact(value, name, _environment_secrets())


def is_secret_name(name: str) -> bool:
    """Whether a key or environment variable of this name holds a secret."""
    if _VOCABULARY_TOKENS.match(name.lower()):
        return False
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return not _SECRET_WORDS.isdisjoint(re.split(r"[^a-z0-9]+", snake))


def _environment_secrets() -> list[str]:
    return [
        value
        for name, value in os.environ.items()
        if len(value) >= _SHORTEST_SECRET and is_secret_name(name)
    ]


def _redact(value: Any, name: str, secrets: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _redact(item, str(key), secrets) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redact(item, name, secrets) for item in value]
    if not isinstance(value, str) or not value:
        return value
    if is_secret_name(name):
        return REDACTED
    for secret in secrets:
        value = value.replace(secret, REDACTED)
    value = _SECRET_VALUES.sub(REDACTED, value)
    return _URL_PASSWORD.sub(rf"\1:{REDACTED}@", value)
