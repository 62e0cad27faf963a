"""``anchorcontext config``: check a config and show it resolved, or list every key."""

from __future__ import annotations

from pathlib import Path

import click

from anchorcontext.cli.common import Outcome, echo, plain_command
from anchorcontext.errors import UserError
from anchorcontext.words import counted


@plain_command
@click.argument("config_path", metavar="[CONFIG]", required=False, type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--reference", is_flag=True, help="Print every key of the config as Markdown.")
@click.option("--world", type=int, metavar="N", help="Also check that N ranks can run it.")
def command(
    config_path: Path | None, overrides: tuple[str, ...], reference: bool, world: int | None
) -> Outcome:
    """Check CONFIG with its overrides and print it with every key spelled out."""
    from anchorcontext.config import config_hash, load_config, resolved_yaml

    if reference:
        from anchorcontext.config.reference import reference_markdown

        echo(reference_markdown().rstrip())
        return Outcome()
    if config_path is None:
        raise UserError("no config given; name a YAML file, or ask for --reference")
    config = load_config(config_path, overrides)
    echo(f"# {config_path}, hash {config_hash(config)}")
    if world is not None:
        shape = config.check_world(world)
        dealt = f"dp {shape.dp}, sp {shape.sp}, accumulation {shape.accumulation}"
        echo(f"# {counted(world, 'rank')}: {dealt}")
    echo(resolved_yaml(config).rstrip())
    return Outcome({"hash": config_hash(config), "config": config})
