"""What all sections share, and how a broken rule is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One section of the YAML file: frozen, strict about types, closed to unknown keys.

    The sentence under each field is its description in the reference and in error messages.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,  # `steps: "8"`, `steps: true` and `steps: 8.0` are mistakes, not numbers
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        serialize_by_alias=True,  # a key that Python reserves (`from`) is an alias
    )


@dataclass(frozen=True)
class Problem:
    """A broken rule: the dotted key, its value, the rule and the fix."""

    key: str
    value: Any
    rule: str
    fix: str

    def __str__(self) -> str:
        return f"{self.key} = {shown(self.value)}: {self.rule}; {self.fix}"


class BrokenRules(ValueError):
    """Problems that concern several keys at once; pydantic carries it to the loader."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


def shown(value: Any) -> str:
    """A value as the YAML file would spell it, shortened."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."
