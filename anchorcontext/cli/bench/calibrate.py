"""``anchorcontext bench calibrate``: a hardware profile of the machine at hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from anchorcontext.cli.bench.options import parse_heads
from anchorcontext.cli.common import Outcome, echo, echo_table, is_main_rank, plain_command
from anchorcontext.errors import UserError, writing
from anchorcontext.words import counted


@plain_command
@click.argument("path", metavar="PROFILE.yaml", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--base",
    metavar="NAME|FILE",
    help="Profile that figures come from which cannot be measured here. Default: cpu, or h100.",
)
@click.option("--dtype", type=click.Choice(["bf16", "fp32"]), help="Default: bf16 on a GPU.")
@click.option("--heads", metavar="Q/KV", help="Heads; default 8/2, on a GPU 32/8.")
@click.option("--head-dim", type=click.IntRange(min=1), metavar="D", help="Default 64, GPU 128.")
@click.option("--hidden", type=click.IntRange(min=1), metavar="H", help="Default 1024, GPU 4096.")
@click.option("--tokens", type=click.IntRange(min=64), metavar="N", help="Of the longest document.")
@click.option("--threads", default=1, metavar="N", show_default=True, help="CPU threads of a rank.")
@click.option(
    "--ranks",
    default=2,
    type=click.IntRange(min=1),
    metavar="N",
    show_default=True,
    help="Ranks to start for the link's figures, without a launcher; 1 leaves them out.",
)
def calibrate(
    path: Path,
    base: str | None,
    dtype: str | None,
    heads: str | None,
    head_dim: int | None,
    hidden: int | None,
    tokens: int | None,
    threads: int,
    ranks: int,
) -> Outcome:
    """Measure this machine and write its hardware profile, for parallel.hardware and plan.

    Matrix products, attention, memory, and the links between ranks: those of this machine, or under
    torchrun those of the job, across nodes too.
    """
    import torch

    from anchorcontext.bench.calibrate import HEADERS, Settings, table_rows
    from anchorcontext.bench.calibrate import calibrate as measure
    from anchorcontext.environment import measured_on
    from anchorcontext.hardware import load_hardware, profile_text
    from anchorcontext.train.launch import start_process

    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"{path}: a profile is a YAML file; give a name that ends in .yaml")
    torch.set_num_threads(threads)
    process = start_process()
    device = process.device
    profile = load_hardware(base or ("h100" if device.type == "cuda" else "cpu"))
    settings = Settings.of_gpu() if device.type == "cuda" else Settings()
    num_heads, num_kv_heads = parse_heads(heads) if heads else (None, None)
    given: dict[str, Any] = {
        "dtype": dtype,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_size": hidden,
        "ranks": ranks,
    }
    settings = replace(settings, **{key: value for key, value in given.items() if value})
    if tokens:
        settings = settings.of_length(tokens)
    found = measure(profile, settings, device, path.stem)
    process.close()
    where = f"{measured_on(device)}, {counted(threads, 'thread')} a rank, {settings.dtype}"
    echo_table(table_rows(found), HEADERS, title=where)
    for key in found.kept:
        echo(f"{key} = {getattr(found.hardware, key):.4g}: {found.remarks[key]}")
    if is_main_rank():
        head = f"Written by `anchorcontext bench calibrate`: {where}."
        with writing("PROFILE.yaml", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(profile_text(found.hardware, found.remarks, head), encoding="utf-8")
        load_hardware(str(path))
        echo(f"written to {path}; name it as parallel.hardware={path}")
    return Outcome(found)
