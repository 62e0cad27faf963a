"""A group of commands whose modules are imported only when they are called."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

import click


class LazyGroup(click.Group):
    """A group that lists its commands without importing them: ``--help`` takes milliseconds.

    ``listed`` maps a command to its line of help; the module of ``import-gguf`` is
    ``import_gguf.py`` in ``package``, and defines ``command``.
    """

    def __init__(self, *args: Any, listed: dict[str, str], package: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.listed, self.package = listed, package

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.listed)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.listed:
            return None
        module = importlib.import_module(f"{self.package}.{cmd_name.replace('-', '_')}")
        command = module.command
        assert isinstance(command, click.Command), f"{module.__name__}.command is no click command"
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self.listed and not name.startswith("-"):
            near = difflib.get_close_matches(name, self.listed, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(self.listed)}"
            ctx.fail(f"no command {name!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self.listed.items()))
