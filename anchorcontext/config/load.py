"""From a YAML file and ``key=value`` overrides to a checked config, and back.

A file may say ``extends: other.yaml`` (relative to itself): mappings are merged key by key, the
file's own values win, lists and single values are replaced. An override's value is read as YAML:
``a.b=[1,2]``, ``a.b=null``, ``a.b={c: 1}``; ``a.0.b=x`` reaches into a list. Overrides come last,
in order.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from anchorcontext.config.messages import describe_errors, unknown_keys
from anchorcontext.config.schema import Config
from anchorcontext.config.yaml_io import Marks, Path_, parse_value, read_mapping, to_yaml
from anchorcontext.errors import UserError
from anchorcontext.files import written_whole

OVERRIDE_MARK = "override"


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read, override, check.

    Args:
        path: the YAML file.
        overrides: ``key=value`` texts with dotted keys.

    Raises:
        UserError: a file, key, value or rule is wrong. One line a mistake, all of them at once,
            with the file and line, the dotted key, the value, the rule and the fix.
    """
    path = Path(path)
    values, marks = _read_with_parents(path, ())
    for text in overrides:
        _override(values, marks, text)
    run = values.get("run", {})
    if isinstance(run, dict) and run.get("name") is None:
        values["run"] = {**run, "name": path.stem}
    return parse_config(values, marks, source=str(path))


def parse_config(
    values: dict[str, Any],
    marks: Marks | None = None,
    *,
    overrides: Sequence[str] = (),
    source: str = "config",
) -> Config:
    """Override and check a nested mapping, which is left as it is.

    ``marks`` says where each key came from; keys without one are reported as from ``source``.

    Raises:
        UserError: as ``load_config``.
    """
    values, marks = copy.deepcopy(values), dict(marks or {})
    for text in overrides:
        _override(values, marks, text)
    lines = unknown_keys(values, Config, marks, source)
    if lines:
        raise UserError("\n".join(lines))
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise UserError("\n".join(describe_errors(error, Config, values, marks, source))) from None


def save_config(config: Config, path: str | Path) -> None:
    """Write every key, defaults included, so that ``load_config(path)`` gives an equal config."""
    with written_whole(Path(path)) as beside:
        beside.write_text(resolved_yaml(config), encoding="utf-8")


def resolved_yaml(config: Config) -> str:
    """The config as YAML with every key spelled out."""
    return to_yaml(config.model_dump(mode="json"))


def _read_with_parents(path: Path, children: tuple[Path, ...]) -> tuple[dict[str, Any], Marks]:
    resolved = path.resolve()
    if resolved in children:
        chain = " -> ".join(child.name for child in (*children, resolved))
        raise UserError(f"{path}: extends itself: {chain}; remove one extends:")
    values, marks = read_mapping(path)
    parent = values.pop("extends", None)
    if parent is None:
        return values, marks
    if not isinstance(parent, str):
        place = marks[("extends",)]
        raise UserError(f"{place}: extends = {parent!r}: is the path of one YAML file; write text")
    base_values, base_marks = _read_with_parents(path.parent / parent, (*children, resolved))
    return _merge(base_values, values), {**base_marks, **marks}


def _merge(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """``values`` over ``base``; mappings are merged, everything else is replaced."""
    merged = dict(base)
    for key, value in values.items():
        below = merged.get(key)
        both = isinstance(below, dict) and isinstance(value, dict)
        merged[key] = _merge(below, value) if both else value  # type: ignore[arg-type]
    return merged


def _override(values: dict[str, Any], marks: Marks, text: str) -> None:
    """Apply one ``key=value`` to ``values``, in place."""
    key, equals, right = text.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise UserError(f"override {text!r}: has the form section.key=value, as in train.steps=20")
    if not right.strip():
        raise UserError(f"override {text!r}: has no value; write {key}=null for none")
    try:
        value = parse_value(right)
    except ValueError as error:
        raise UserError(f"override {text!r}: {error}; quote it for YAML and the shell") from None
    parent: Any = values
    where: Path_ = ()
    for index, name in enumerate(names):
        last = index == len(names) - 1
        if isinstance(parent, list):
            step: str | int = _list_index(parent, name, text)
        elif isinstance(parent, dict):
            step = name
        else:
            raise UserError(f"override {text!r}: {'.'.join(map(str, where))} is no section")
        where = (*where, step)
        if last:
            parent[step] = value
        elif isinstance(parent, dict) and parent.get(name) is None:
            parent[name] = {}
            marks[where] = OVERRIDE_MARK
        parent = parent[step]
    for old in [mark for mark in marks if mark[: len(where)] == where]:
        del marks[old]
    marks[where] = OVERRIDE_MARK


def _list_index(items: list[Any], name: str, text: str) -> int:
    if not name.isdigit() or int(name) >= len(items):
        rule = f"{name!r} must be an index of a list of {len(items)}"
        raise UserError(f"override {text!r}: {rule}; give a number from 0")
    return int(name)
