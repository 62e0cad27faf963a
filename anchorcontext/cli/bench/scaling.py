"""``anchorcontext bench step``, ``growth`` and ``memory``: what a training step costs."""

from __future__ import annotations

from pathlib import Path

import click

from anchorcontext.cli.bench.options import config_words, markdown_option, parse_heads
from anchorcontext.cli.common import (
    Outcome,
    config_command,
    echo,
    echo_table,
    is_main_rank,
    plain_command,
)
from anchorcontext.config import Config
from anchorcontext.errors import UserError
from anchorcontext.words import counted


@config_command
@click.option("--mix", default="slimpajama", show_default=True, help="Named length mix.")
@click.option(
    "--repeats",
    default=5,
    type=click.IntRange(min=1),
    metavar="N",
    show_default=True,
    help="Measured windows.",
)
@click.option("--seed", default=0, metavar="N", show_default=True, help="First window of the mix.")
@markdown_option("docs/benchmarks.md")
def step(config: Config, mix: str, repeats: int, seed: int, markdown: Path | None) -> Outcome:
    """Time a training step on parallel.sp ranks of one thread against one process of as many."""
    from anchorcontext.bench.step import bench_step, part_headers, part_rows, step_markdown
    from anchorcontext.markdown import write_section

    if config.parallel.sp < 2:
        raise UserError("parallel.sp = 1: give the ranks to compare, as in parallel.sp=2")
    machine = _machine()
    report = bench_step(config, mix, repeats, seed, echo)
    documents = f"{min(report.documents)} to {counted(max(report.documents), 'document')}"
    setting = (
        f"{config.run.name}: {report.window_tokens:,} tokens, {documents} of the mix {mix}, "
        f"mode {report.mode}, {config.model.dtype}, {machine}."
    )
    echo_table(part_rows(report), part_headers(report), title=setting)
    echo(f"{report.sp} ranks over one process: {report.ratio:.3f}, target {report.target:.2f}")
    if markdown is not None and is_main_rank():
        line = (
            f"anchorcontext bench step {config_words()} --mix {mix} --repeats {repeats} "
            f"--seed {seed} --markdown {markdown}"
        )
        write_section(markdown, "step", step_markdown(report, setting, line))
        echo(f"written to {markdown}")
    return Outcome(report)


@config_command
@click.option("--mix", default="slimpajama", show_default=True, help="Named length mix.")
@click.option(
    "--chunk-tokens",
    default=4096,
    type=click.IntRange(min=1),
    metavar="N",
    show_default=True,
    help="Of chunked MLPs.",
)
@click.option("--threads", default=1, metavar="N", show_default=True, help="CPU threads.")
@markdown_option("docs/benchmarks.md")
def memory(
    config: Config, mix: str, chunk_tokens: int, threads: int, markdown: Path | None
) -> Outcome:
    """Measure the memory of a training step with each memory lever, against none (Linux)."""
    import sys

    from anchorcontext.bench import memory as bench
    from anchorcontext.markdown import write_section

    if sys.platform != "linux":
        raise UserError(f"bench memory on {sys.platform}: it reads /proc/self/status; use Linux")
    tokens = config.data.window_tokens
    setting = f"{config.run.name}: {tokens:,} tokens of the mix {mix}, {_machine()}."
    rows = bench.bench_memory(config, mix, chunk_tokens, threads, echo)
    echo_table(bench.memory_rows(rows), bench.HEADERS, title=setting)
    if markdown is not None and is_main_rank():
        line = (
            f"anchorcontext bench memory {config_words()} --mix {mix} "
            f"--chunk-tokens {chunk_tokens} --threads {threads} --markdown {markdown}"
        )
        write_section(markdown, "memory", bench.memory_markdown(rows, setting, line))
        echo(f"written to {markdown}")
    return Outcome(rows)


@plain_command
@click.option("--mix", default="slimpajama", show_default=True, help="Named length mix.")
@click.option(
    "--windows",
    default="16384,32768,65536,131072",
    metavar="L[,L...]",
    show_default=True,
    help="Tokens.",
)
@click.option("--sp", default="1,2,4", metavar="P[,P...]", show_default=True, help="Ranks.")
@click.option(
    "--heads",
    default="1/1",
    metavar="Q/KV",
    show_default=True,
    help="Heads; a full window of 128K tokens is 8 TFLOPs a query head of 64.",
)
@click.option("--head-dim", default=64, metavar="D", show_default=True)
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True)
@click.option("--seed", default=0, metavar="N", show_default=True, help="Which window of the mix.")
@click.option(
    "--markdown",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="PATH",
    help="Write the table into its section of PATH, docs/benchmarks.md, and the figure beside it.",
)
def growth(
    mix: str,
    windows: str,
    sp: str,
    heads: str,
    head_dim: int,
    dtype: str,
    seed: int,
    markdown: Path | None,
) -> Outcome:
    """Time and memory of one layer's attention as the window grows, anchor and full."""
    import torch

    from anchorcontext.bench import growth as bench
    from anchorcontext.markdown import write_section

    num_heads, num_kv_heads = parse_heads(heads)
    machine = _machine()
    results = bench.bench_growth(
        mix=mix,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype],
        seed=seed,
        lengths=_numbers("--windows", windows),
        sp_sizes=_numbers("--sp", sp),
        tell=echo,
    )
    setting = (
        f"Mix {mix}, {num_heads} query and {num_kv_heads} key/value heads of {head_dim}, {dtype}, "
        f"{machine}."
    )
    echo_table(bench.growth_rows(results), bench.growth_headers(results), title=setting)
    if markdown is not None and is_main_rank():
        line = (
            f"anchorcontext bench growth --mix {mix} --windows {windows} --sp {sp} --heads {heads} "
            f"--head-dim {head_dim} --dtype {dtype} --seed {seed} --markdown {markdown}"
        )
        figure = markdown.with_name("growth.png")
        bench.draw_growth(results, figure)
        text = bench.growth_markdown(results, setting, line, figure.name)
        write_section(markdown, "growth", text)
        echo(f"written to {markdown} and {figure}")
    return Outcome(results)


def _machine() -> str:
    """What runs it, when, and how busy it was before."""
    import os

    from anchorcontext.environment import cores, measured_on

    load = os.getloadavg()[0]
    return f"{cores()} with a load of {load:.1f} before the run, {measured_on()}"


def _numbers(option: str, text: str) -> list[int]:
    """``1,2,4`` as numbers, rising."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise UserError(f"{option} {text}: give positive numbers, as in 1,2,4")
    return sorted({int(part) for part in parts})
