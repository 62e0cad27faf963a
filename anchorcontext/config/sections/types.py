"""Types of keys: the rules that concern one value."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

Dtype = Literal["bf16", "fp32"]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Ratio = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]


def bool_or_section(value: Any) -> Any:
    """``key: true`` is a section of defaults and ``key: false`` is null."""
    if isinstance(value, bool):
        return {} if value else None
    return value
