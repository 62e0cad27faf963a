"""YAML in and out: PyYAML's safe parser with the scalars of YAML 1.2, and positions for errors.

YAML 1.1, PyYAML's default, reads ``1e-5`` as text, ``no`` and ``off`` as false, ``010`` as 8 and
``1:30`` as 90. Here ``1e-5`` is a number, and only ``true``, ``false``, decimal numbers and
``null`` are anything but text. ``65_536`` may be written with underscores.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

from anchorcontext.errors import UserError

Path_ = tuple[str | int, ...]  # ("data", "sources", 0, "path")
Marks = dict[Path_, str]  # where each key stands: "configs/demo.yaml:12"


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict] = {}


class _Dumper(yaml.SafeDumper):
    """Quotes what ``_Loader`` or any reader of YAML 1.1 would take for something but text."""

    yaml_implicit_resolvers: ClassVar[dict] = {
        first: list(resolvers)
        for first, resolvers in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _class in (_Loader, _Dumper):
    for _tag, _pattern, _first in (
        ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
        ("int", r"[-+]?(0|[1-9][0-9_]*)", "-+0123456789"),
        (
            "float",
            r"[-+]?(\.[0-9][0-9_]*|(0|[1-9][0-9_]*)(\.[0-9_]*)?)([eE][-+]?[0-9]+)?"
            r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
            "-+.0123456789",
        ),
        ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first)
        )


def _construct_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    # PyYAML's own conversion knows sexagesimal numbers; Python's is right for all of the above.
    text = str(node.value).lower().replace("_", "")
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def read_mapping(path: Path) -> tuple[dict[str, Any], Marks]:
    """The mapping in the file ``path``, and where each of its keys stands.

    Raises:
        UserError: the file is unreadable, is not YAML, holds no mapping, or has a key twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such config file; give the path of a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        marks: Marks = {}
        _walk(node, (), path, marks)
        value = loader.construct_document(node) if node is not None else None
    except yaml.YAMLError as error:
        raise UserError(_syntax_message(path, error)) from None
    if not isinstance(value, dict):
        kind = "nothing" if value is None else f"a {type(value).__name__}"
        raise UserError(f"{path}: holds {kind}; a config is a mapping of sections such as run:")
    return value, marks


def parse_value(text: str) -> Any:
    """The YAML value of ``text``: the right-hand side of a ``key=value`` override.

    Raises:
        ValueError: the text is not YAML or has a key twice.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        _walk(node, (), Path("value"), {})
        return loader.construct_document(node) if node is not None else None
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or str(error)
        raise ValueError(f"is not a YAML value ({problem})") from None
    except UserError as error:
        raise ValueError(str(error)) from None


def to_yaml(value: Any) -> str:
    """``value`` as YAML text that reads back equal; keys keep their order."""
    return yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True
    )


def inline_yaml(value: Any) -> str:
    """``value`` on one line, as the right-hand side of an override takes it."""
    text: str = yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=True,
        allow_unicode=True,
        width=math.inf,
    )
    return text.removesuffix("...\n").strip()


def _walk(node: yaml.Node | None, where: Path_, path: Path, marks: Marks) -> None:
    """Record each key's line; refuse a key that stands twice and one that is no text."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            marks[(*where, index)] = f"{path}:{item.start_mark.line + 1}"
            _walk(item, (*where, index), path, marks)
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        place = f"{path}:{key_node.start_mark.line + 1}"
        if key_node.tag != "tag:yaml.org,2002:str":
            raise UserError(f"{place}: key {key_node.value!r}: a key is text; put it in quotes")
        inner = (*where, key_node.value)
        if inner in marks:
            name = ".".join(str(part) for part in inner)
            raise UserError(f"{place}: {name}: stands twice, first at {marks[inner]}; remove one")
        marks[inner] = place
        _walk(value_node, inner, path, marks)


def _syntax_message(path: Path, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f"{path}:{mark.line + 1}" if mark is not None else str(path)
    problem = getattr(error, "problem", None) or str(error).replace("\n", " ")
    return f"{place}: not YAML: {problem}; mend the line (indent with spaces, one key a line)"
