"""What a mistake in a config looks like: ``file:line: section.key = value: rule; fix``."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from anchorcontext.config.base import BrokenRules, Section, shown
from anchorcontext.config.fields import description, inner_section, known_keys, section_fields
from anchorcontext.config.yaml_io import Marks, Path_

# pydantic's error type -> (rule, fix); {names} are pydantic's context or one of ours.
_RULES = {
    "greater_than": ("must be greater than {gt:g}", "give a larger number"),
    "greater_than_equal": ("must be at least {ge:g}", "give {ge:g} or more"),
    "less_than": ("must be less than {lt:g}", "give a smaller number"),
    "less_than_equal": ("must be at most {le:g}", "give {le:g} or less"),
    "finite_number": ("must be finite", "give an ordinary number"),
    "int_type": ("must be a whole number", "write it without quotes or a decimal point"),
    "float_type": ("must be a number", "write it without quotes"),
    "bool_type": ("must be true or false", "write true or false, without quotes"),
    "string_type": ("must be text", "put it in quotes"),
    "string_too_short": ("must not be empty", "give a text, or leave the key out"),
    "dict_type": ("must be a mapping", "write its keys below it, or {{key: value}}"),
    "model_type": ("must be a section", "write its keys below it: {keys}"),
    "tuple_type": ("must be a list", "write it as [a, b]"),
    "too_long": ("must have {max_length} entries", "remove the rest"),
}


def unknown_keys(
    values: dict[str, Any], model: type[Section], marks: Marks, source: str
) -> list[str]:
    """A line for each key that the schema does not know, with the nearest one it knows."""
    lines = []
    for where, section in _walk_unknown(values, model, ()):
        hint = _nearest(where, section, model)
        lines.append(f"{_place(where, marks, source)}: {dotted(where)}: unknown key; {hint}")
    return lines


def describe_errors(
    error: ValidationError,
    model: type[Section],
    values: dict[str, Any],
    marks: Marks,
    source: str,
) -> list[str]:
    """A line for each mistake that pydantic found."""
    lines: dict[str, None] = {}  # a union reports one mistake once for each of its members
    for item in error.errors():
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, BrokenRules):
            for problem in cause.problems:
                where = tuple(int(p) if p.isdigit() else p for p in problem.key.split("."))
                lines[f"{_place(where, marks, source)}: {problem}"] = None
            continue
        where = _known_part(item["loc"], model)
        field = _field(where, model)
        if item["type"] == "missing" and not isinstance(where[-1], int):
            what = description(field) if field is not None else ""
            lines[f"{_place(where, marks, source)}: {dotted(where)} is missing: {what}"] = None
            continue
        value = _value(values, where)
        rule, fix = _rule(item, where, model, value)
        head = f"{_place(where, marks, source)}: {dotted(where)} = {shown(value)}"
        lines[f"{head}: {rule}; {fix}"] = None
    return list(lines)


def dotted(where: Path_) -> str:
    """``("data", "sources", 0, "path")`` as ``data.sources.0.path``."""
    return ".".join(str(part) for part in where)


def _rule(item: Any, where: Path_, model: type[Section], value: Any) -> tuple[str, str]:
    """The rule that a value broke and what to do about it."""
    kind, context = item["type"], item.get("ctx", {})
    choices = _choices(where, model)
    if choices:
        texts = [shown(choice).strip("'") for choice in choices]
        near = difflib.get_close_matches(str(value), texts, n=1)
        near = near or [text for text in texts if str(value) and text.startswith(str(value))]
        fix = f"did you mean {near[0]}?" if near else f"set it to {texts[0]}, for example"
        return f"must be one of {', '.join(texts)}{_other_types(where, model)}", fix
    if kind == "missing":
        return "has too few entries", "write all of them, as in [0.9, 0.95]"
    if kind == "value_error":
        rule, _, fix = str(context["error"]).partition("; ")
        return rule, fix
    if kind in _RULES:
        keys = ""
        field = _field(where, model)
        inner = inner_section(field.annotation) if field is not None else None
        if inner is not None:
            keys = ", ".join(section_fields(inner))
        rule, fix = _RULES[kind]
        return rule.format(**context, keys=keys), fix.format(**context, keys=keys)
    return item["msg"][0].lower() + item["msg"][1:], "see docs/config.md"


def _choices(where: Path_, model: type[Section]) -> list[Any]:
    """The literal values that a key accepts."""

    def literals(annotation: Any) -> Iterator[Any]:
        if get_origin(annotation) is Literal:
            yield from get_args(annotation)
        else:
            for argument in get_args(annotation):
                yield from literals(argument)

    field = _field(where, model)
    return list(literals(field.annotation)) if field is not None else []


def _other_types(where: Path_, model: type[Section]) -> str:
    field = _field(where, model)
    arguments = get_args(field.annotation) if field is not None else ()
    names = []
    for argument in arguments:
        if argument is type(None):
            names.append("null")
        elif int in (argument, *get_args(argument)):
            names.append("an integer from 0")
    return "".join(f", {name}" for name in names)


def _walk_unknown(
    values: Any, model: type[Section], where: Path_
) -> Iterator[tuple[Path_, type[Section]]]:
    if not isinstance(values, dict):
        return
    for key, value in values.items():
        field = section_fields(model).get(key)
        if field is None:
            yield (*where, key), model
            continue
        inner = inner_section(field.annotation)
        if inner is None:
            continue
        if isinstance(value, list):
            for index, entry in enumerate(value):
                yield from _walk_unknown(entry, inner, (*where, key, index))
        else:
            yield from _walk_unknown(value, inner, (*where, key))


def _nearest(where: Path_, inner: type[Section], root: type[Section]) -> str:
    """The likeliest meaning: a near name in the same section, else the same name elsewhere."""
    name, parents = str(where[-1]), where[:-1]
    near = difflib.get_close_matches(name, section_fields(inner), n=1)
    if near:
        return f"did you mean {dotted((*parents, near[0]))}?"
    names = [key.name for key in known_keys(root)]
    by_leaf = {full.rsplit(".", 1)[-1]: full for full in reversed(names)}
    leaf = difflib.get_close_matches(name, by_leaf, n=1, cutoff=0.75)
    if leaf:
        return f"did you mean {by_leaf[leaf[0]]}?"
    section = f"{dotted(parents)} takes" if parents else "the sections are"
    return f"{section} {', '.join(section_fields(inner))}"


def _place(where: Path_, marks: Marks, source: str) -> str:
    """Where the key stands, or the nearest section above it."""
    for stop in range(len(where), 0, -1):
        if where[:stop] in marks:
            return marks[where[:stop]]
    return source


def _known_part(location: tuple[Any, ...], model: type[Section]) -> Path_:
    """pydantic's location without the names of union members that it appends."""
    where: Path_ = ()
    for part in location:
        field = _field((*where, part), model)
        if field is None and not isinstance(part, int):
            break
        where = (*where, part)
    return where


def _field(where: Path_, model: type[Section]) -> Any:
    field = None
    current: type[Section] | None = model
    for part in where:
        if isinstance(part, int):
            continue
        field = section_fields(current).get(part) if current is not None else None
        if field is None:
            return None
        current = inner_section(field.annotation)
    return field


def _value(values: Any, where: Path_) -> Any:
    for part in where:
        if isinstance(values, dict):
            values = values.get(part)
        elif isinstance(values, list | tuple) and isinstance(part, int) and part < len(values):
            values = values[part]
        else:
            return None
    return values
