"""``anchorcontext bench kernels`` and ``bench numerics``: the engines, their speed and errors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from anchorcontext.cli.bench.options import markdown_option, parse_heads
from anchorcontext.cli.common import Outcome, echo, echo_table, is_main_rank, plain_command
from anchorcontext.errors import UserError
from anchorcontext.words import counted

if TYPE_CHECKING:
    import torch

_lengths = click.option(
    "--tokens", "lengths", multiple=True, type=click.IntRange(min=2), metavar="L",
    help="Tokens of a window; may be given several times.",
)  # fmt: skip
_threads = click.option("--threads", default=1, metavar="N", show_default=True, help="CPU threads.")


@plain_command
@_lengths
@click.option(
    "--mode",
    "modes",
    multiple=True,
    type=click.Choice(["full", "intra_doc", "anchor"]),
    help="Modes to time; may be given several times. Default: all, of which full takes longest.",
)
@click.option("--heads", default="8/2", metavar="Q/KV", show_default=True, help="Heads.")
@click.option("--head-dim", default=64, metavar="D", show_default=True)
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True)
@click.option(
    "--mix", "mixes", multiple=True, default=["slimpajama"], show_default=True,
    help="Named length mix; may be given several times.",
)  # fmt: skip
@_threads
@click.option("--repeats", default=3, metavar="N", show_default=True)
@markdown_option("docs/benchmarks.md")
def kernels(
    lengths: tuple[int, ...],
    modes: tuple[str, ...],
    heads: str,
    head_dim: int,
    dtype: str,
    mixes: tuple[str, ...],
    threads: int,
    repeats: int,
    markdown: Path | None,
) -> Outcome:
    """FLOP rate of every engine, against torch's own attention on one causal sequence.

    Default: one window of 65,536 tokens.
    """
    import torch

    from anchorcontext.bench.kernels import (
        HEADERS,
        MODES,
        bench_kernels,
        kernels_markdown,
        table_rows,
    )
    from anchorcontext.environment import measured_on
    from anchorcontext.markdown import write_section

    lengths, modes = lengths or (65536,), modes or MODES
    torch.set_num_threads(threads)
    device = _device()
    results = bench_kernels(
        lengths=lengths,
        device=device,
        dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype],
        heads=parse_heads(heads),
        head_dim=head_dim,
        mixes=mixes,
        modes=modes,
        repeats=repeats,
    )
    setting = (
        f"{heads} query/key heads of {head_dim}, {dtype}, "
        f"{counted(threads, 'thread')}, {measured_on(device)}."
    )
    echo_table(table_rows(results), HEADERS, title=setting)
    if markdown is not None and is_main_rank():
        tokens = " ".join(f"--tokens {n}" for n in lengths)
        tokens += "".join(f" --mode {mode}" for mode in modes)
        tokens += "".join(f" --mix {mix}" for mix in mixes)
        line = (
            f"anchorcontext bench kernels {tokens} --heads {heads} --head-dim {head_dim} "
            f"--dtype {dtype} --threads {threads} --repeats {repeats} "
            f"--markdown {markdown}"
        )
        write_section(markdown, "kernels", kernels_markdown(results, setting, line))
        echo(f"written to {markdown}")
    return Outcome(results)


@plain_command
@_lengths
@click.option("--heads", default="2/1", metavar="Q/KV", show_default=True, help="Heads.")
@click.option("--head-dim", default=64, metavar="D", show_default=True)
@_threads
@markdown_option("docs/kernels.md")
def numerics(
    lengths: tuple[int, ...], heads: str, head_dim: int, threads: int, markdown: Path | None
) -> Outcome:
    """Error of every engine against fp64: output, LSE and gradients, in fp32, bf16, fp16.

    Default: windows of 1,024, 4,096, 16,384 and 65,536 tokens.
    """
    import torch

    from anchorcontext.bench.numerics import (
        HEADERS,
        bench_numerics,
        numerics_markdown,
        table_rows,
    )
    from anchorcontext.environment import measured_on
    from anchorcontext.markdown import write_section

    lengths = lengths or (1024, 4096, 16384, 65536)
    if head_dim < 1:
        raise UserError(f"--head-dim {head_dim}: a head has at least one dimension")
    torch.set_num_threads(threads)
    device = _device()
    results = list(
        bench_numerics(
            lengths=lengths,
            dtypes=[torch.float32, torch.bfloat16, torch.float16],
            device=device,
            heads=parse_heads(heads),
            head_dim=head_dim,
        )
    )
    setting = f"{heads} query/key heads of {head_dim}, {measured_on(device)}."
    echo_table(table_rows(results), HEADERS, title=setting)
    if markdown is not None and is_main_rank():
        tokens = " ".join(f"--tokens {n}" for n in lengths)
        line = (
            f"anchorcontext bench numerics {tokens} --heads {heads} --head-dim {head_dim} "
            f"--markdown {markdown}"
        )
        write_section(markdown, "numerics", numerics_markdown(results, setting, line))
        echo(f"written to {markdown}")
    return Outcome(results)


def _device() -> torch.device:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
