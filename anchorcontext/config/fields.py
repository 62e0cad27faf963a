"""Every key of the config as a flat list: for near misses, error messages and the reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from anchorcontext.config.base import Section


@dataclass(frozen=True)
class KnownKey:
    """One key: ``data.sources[].path``, what it takes, what it defaults to, what it means."""

    name: str
    takes: str
    required: bool
    default: Any
    description: str


def known_keys(model: type[Section], prefix: str = "") -> Iterator[KnownKey]:
    """The keys of ``model`` and of the sections below it, in the order of the schema."""
    for name, field in section_fields(model).items():
        key = f"{prefix}{name}"
        inner = inner_section(field.annotation)
        if inner is None or not _is_plain_section(field.annotation):
            yield KnownKey(
                name=key,
                takes=takes(field.annotation),
                required=field.is_required(),
                default=field.get_default(call_default_factory=True),
                description=description(field),
            )
        if inner is not None:
            in_list = get_origin(field.annotation) is tuple
            yield from known_keys(inner, f"{key}[]." if in_list else f"{key}.")


def section_fields(model: type[Section]) -> dict[str, FieldInfo]:
    """The fields of a section by the keys that stand in the YAML file."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def inner_section(annotation: Any) -> type[Section] | None:
    """The section inside an annotation, as in ``Section | None`` or ``tuple[Section, ...]``."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    for argument in get_args(annotation):
        found = inner_section(argument)
        if found is not None:
            return found
    return None


def description(field: FieldInfo) -> str:
    """The sentence under a field, on one line."""
    return " ".join((field.description or "").split())


def takes(annotation: Any) -> str:
    """What a key accepts, in words for the reference."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return "null"
    if origin is Annotated:
        return takes(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(takes(argument) for argument in arguments)
    if origin is tuple:
        items = [argument for argument in arguments if argument is not Ellipsis]
        return f"list of {takes(items[0])}" + (f" ({len(items)})" if len(items) > 1 else "")
    if origin is dict or annotation is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    return {int: "integer", float: "number", bool: "true or false", str: "text"}[annotation]


def _is_plain_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)
