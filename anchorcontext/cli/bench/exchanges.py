"""``anchorcontext bench exchanges``: the ranks of this job against one device."""

from __future__ import annotations

import click

from anchorcontext.cli.bench.options import parse_heads
from anchorcontext.cli.common import Outcome, echo, echo_table, is_main_rank, plain_command
from anchorcontext.words import counted


@plain_command
@click.option("--tokens", type=click.IntRange(min=64), metavar="N", help="Default 4096, GPU 65536.")
@click.option("--mix", default="slimpajama", show_default=True, help="Named length mix.")
@click.option("--dtype", type=click.Choice(["bf16", "fp32"]), help="Default fp32, on a GPU bf16.")
@click.option("--heads", metavar="Q/KV", help="Heads; default 8/2, on a GPU 32/8.")
@click.option("--head-dim", type=click.IntRange(min=1), metavar="D", help="Default 32, GPU 128.")
@click.option(
    "--repeats",
    default=3,
    type=click.IntRange(min=1),
    metavar="N",
    show_default=True,
    help="Runs of each, of which the median counts.",
)
@click.option("--sp", type=click.IntRange(min=2), metavar="N", help="Ranks of a group; all.")
def exchanges(
    tokens: int | None,
    mix: str,
    dtype: str | None,
    heads: str | None,
    head_dim: int | None,
    repeats: int,
    sp: int | None,
) -> Outcome:
    """Check and time every exchange among the ranks of a job (launch/torchrun.sh bench exchanges).

    One attention layer, forward and backward, in every mode and layout: its error against the whole
    window on one device, the bytes it sends against the plan's, and what of the exchange is hidden.
    Exits with 1 where numbers or bytes are wrong.
    """
    import torch

    from anchorcontext.bench.exchanges import HEADERS, Settings, measure, table_row
    from anchorcontext.environment import measured_on
    from anchorcontext.parallel import build_mesh
    from anchorcontext.train.launch import start_process

    process = start_process()
    on_gpu = process.device.type == "cuda"
    mesh = build_mesh(sp or process.world_size)
    kind = dtype or ("bf16" if on_gpu else "fp32")
    settings = Settings(
        tokens=tokens or (65536 if on_gpu else 4096),
        mix=mix,
        heads=parse_heads(heads or ("32/8" if on_gpu else "8/2")),
        head_dim=head_dim or (128 if on_gpu else 32),
        dtype=torch.bfloat16 if kind == "bf16" else torch.float32,
        repeats=repeats,
    )
    results = []
    for result in measure(settings, mesh, process.control, process.device):
        results.append(result)
        if is_main_rank() and not result.passed:
            echo(" ".join(table_row(result)))
    process.close()
    where = (
        f"{mesh.dp} x {counted(mesh.sp, 'rank')}, {measured_on(process.device)}, {kind}, "
        f"{settings.tokens:,} tokens of {mix}"
    )
    echo_table([table_row(result) for result in results], HEADERS, title=where)
    wrong = sum(not result.passed for result in results)
    echo(f"{wrong} of {len(results)} are wrong" if wrong else f"all {len(results)} are right")
    return Outcome(results, exit_code=int(bool(wrong)))
