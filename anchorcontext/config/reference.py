"""The reference of all keys as Markdown: ``anchorcontext config --reference > docs/config.md``."""

from __future__ import annotations

from anchorcontext.config.base import shown
from anchorcontext.config.fields import KnownKey, description, inner_section, known_keys
from anchorcontext.config.schema import Config

_HEAD = """\
# Configuration reference

Written by `anchorcontext config --reference`; the source is `anchorcontext/config/sections/`.

A config is one YAML file. `extends: other.yaml` takes another file, relative to this one, as the
base: sections are merged key by key, lists are replaced. On the command line `section.key=value`
overrides a key; the value is YAML (`optimizer.betas=[0.9,0.99]`, `train.clip_norm=null`). Paths
are relative to the working directory. Only `true` and `false` are booleans, `1e-5` is a number.

Every run saves its resolved config; `anchorcontext config FILE [key=value]...` prints it.
"""


def reference_markdown() -> str:
    """A table for each section: key, what it takes, default, meaning."""
    parts = [_HEAD]
    for name, field in Config.model_fields.items():
        section = inner_section(field.annotation)
        if section is None:
            parts.append(f"## {name}\n\n{description(field)}\n")
            continue
        parts.append(f"## {name}\n\n{' '.join((section.__doc__ or '').split())}\n")
        rows = ["| key | takes | default | meaning |", "|---|---|---|---|"]
        rows += [_row(key) for key in known_keys(section, f"{name}.")]
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def _row(key: KnownKey) -> str:
    default = "**required**" if key.required else f"`{_default(key)}`"
    meaning = key.description.replace("``", "`").replace("|", "\\|")
    return f"| `{key.name}` | {key.takes} | {default} | {meaning} |"


def _default(key: KnownKey) -> str:
    if isinstance(key.default, tuple):
        return str(list(key.default))
    return key.default if isinstance(key.default, str) else shown(key.default)
