"""``anchorcontext bench layouts``, ``modes`` and ``peers``: attention across ranks and alone."""

from __future__ import annotations

from pathlib import Path

import click

from anchorcontext.cli.bench.options import markdown_option, parse_heads
from anchorcontext.cli.common import Outcome, echo, echo_table, is_main_rank, plain_command
from anchorcontext.words import counted


@plain_command
@click.option(
    "--seed", default=0, metavar="N", show_default=True, help="Which windows of the mixes."
)
@markdown_option("docs/benchmarks.md")
def layouts(seed: int, markdown: Path | None) -> Outcome:
    """Compare layouts on named length mixes: modelled step time, balance and travel."""
    from anchorcontext.bench.layouts import LAYOUTS, bench_layouts, layouts_markdown
    from anchorcontext.markdown import write_section

    results = bench_layouts(seed)
    for link in dict.fromkeys(result.link for result in results):
        cells = {
            (result.mix, result.sp_size, result.layout): result
            for result in results
            if result.link == link
        }
        keys = dict.fromkeys(key[:2] for key in cells)
        echo_table(
            [
                (
                    mix,
                    sp_size,
                    *(f"{cells[mix, sp_size, name].over_bound:.3f}" for name in LAYOUTS),
                    f"{cells[mix, sp_size, 'balanced'].layout_ms:.1f}",
                )
                for mix, sp_size in keys
            ],
            ("window", "ranks", *LAYOUTS, "balanced, ms"),
            title=f"{link}: modelled step time over its lower bound",
        )
    if markdown is not None and is_main_rank():
        write_section(markdown, "layouts", layouts_markdown(results))
        echo(f"written to {markdown}")
    return Outcome(results)


@plain_command
@click.option("--window", default=65536, metavar="L", show_default=True, help="Tokens.")
@click.option("--mix", default="slimpajama", show_default=True, help="Named length mix.")
@click.option("--heads", default="8/2", metavar="Q/KV", show_default=True, help="Heads.")
@click.option("--head-dim", default=64, metavar="D", show_default=True)
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True)
@click.option("--threads", default=1, metavar="N", show_default=True, help="CPU threads.")
@click.option("--repeats", default=3, metavar="N", show_default=True)
@click.option("--seed", default=0, metavar="N", show_default=True, help="Which window of the mix.")
@markdown_option("docs/benchmarks.md")
def modes(
    window: int,
    mix: str,
    heads: str,
    head_dim: int,
    dtype: str,
    threads: int,
    repeats: int,
    seed: int,
    markdown: Path | None,
) -> Outcome:
    """Time one layer's attention on this device in every mode, against full attention."""
    import torch

    from anchorcontext.bench.modes import HEADERS, bench_modes, modes_markdown, table_rows
    from anchorcontext.environment import measured_on
    from anchorcontext.markdown import write_section

    num_heads, num_kv_heads = parse_heads(heads)
    torch.set_num_threads(threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = bench_modes(
        window_tokens=window,
        mix=mix,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype],
        device=device,
        repeats=repeats,
        seed=seed,
    )
    setting = (
        f"{window:,} tokens, {counted(results[0].documents, 'document')} of the mix {mix}, "
        f"{num_heads} query and {num_kv_heads} key/value heads of {head_dim}, {dtype}, "
        f"{counted(threads, 'thread')}, {measured_on(device)}."
    )
    echo_table(table_rows(results), HEADERS, title=setting)
    if markdown is not None and is_main_rank():
        line = (
            f"anchorcontext bench modes --window {window} --mix {mix} --heads {heads} "
            f"--head-dim {head_dim} --dtype {dtype} --threads {threads} --markdown {markdown}"
        )
        write_section(markdown, "modes", modes_markdown(results, setting, line))
        echo(f"written to {markdown}")
    return Outcome(results)


@plain_command
@click.option("--window", default=32768, metavar="L", show_default=True, help="Tokens.")
@click.option(
    "--full-window",
    default=8192,
    metavar="L",
    show_default=True,
    help="Mode full is measured on so many of the window's first tokens.",
)
@click.option("--mix", default="slimpajama", show_default=True, help="Named length mix.")
@click.option("--heads", default="8/2", metavar="Q/KV", show_default=True, help="Heads.")
@click.option("--head-dim", default=64, metavar="D", show_default=True)
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp32", "fp64"]),
    default="bf16",
    show_default=True,
    help="ring-flash-attn's zigzag functions are right in bf16 alone.",
)
@click.option(
    "--sp",
    type=click.IntRange(min=2),
    default=4,
    metavar="P",
    show_default=True,
    help="Ranks, of one thread each.",
)
@click.option("--repeats", type=click.IntRange(min=1), default=3, metavar="N", show_default=True)
@click.option("--seed", default=0, metavar="N", show_default=True, help="Which window of the mix.")
@click.option(
    "--setting",
    "names",
    type=click.Choice(["loopback", "nvlink", "infiniband"]),
    multiple=True,
    help="How the ranks are joined; may be repeated. Default: all. All but loopback need root.",
)
@markdown_option("docs/benchmarks.md")
def peers(
    window: int,
    full_window: int,
    mix: str,
    heads: str,
    head_dim: int,
    dtype: str,
    sp: int,
    repeats: int,
    seed: int,
    names: tuple[str, ...],
    markdown: Path | None,
) -> Outcome:
    """Compare distributed attention with ring-flash-attn's, DeepSpeed's and PyTorch's."""
    import torch

    from anchorcontext.bench import peers_table as table
    from anchorcontext.bench.peer_functions import FUNCTIONS
    from anchorcontext.bench.peers import SETTINGS, Workload, bench_peers
    from anchorcontext.environment import cores, measured_on
    from anchorcontext.markdown import write_section

    num_heads, num_kv_heads = parse_heads(heads)
    workload = Workload(
        window_tokens=window,
        full_tokens=full_window,
        mix=mix,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype={"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}[dtype],
        sp=sp,
        repeats=repeats,
        seed=seed,
    )
    report = bench_peers(workload, [SETTINGS[name] for name in names or SETTINGS], echo)
    setting = (
        f"{window:,} tokens, {counted(report.documents, 'document')} of the mix {mix} "
        f"(the anchor included), {num_heads} query and {num_kv_heads} key/value heads of "
        f"{head_dim}, {dtype}, {sp} ranks of one thread on {cores()}, {measured_on()}. "
        f"Forward and backward of one layer's attention, {counted(repeats, 'repeat')} in turn in "
        "one run."
    )
    for line in (setting, *table.setting_lines(report)):
        echo(line)
    for function in FUNCTIONS:
        echo_table(
            table.contender_rows(report, function),
            table.contender_headers(report),
            title=f"{function}: time over the best peer's",
        )
    echo_table(table.target_rows(report), table.TARGET_HEADERS, title="targets")
    if markdown is not None and is_main_rank():
        options = (
            f"--window {window} --full-window {full_window} --mix {mix} --heads {heads} "
            f"--head-dim {head_dim} --dtype {dtype} --sp {sp} --repeats {repeats} --seed {seed}"
        )
        options += "".join(f" --setting {name}" for name in names)
        line = f"anchorcontext bench peers {options} --markdown {markdown}"
        write_section(markdown, "peers", table.peers_markdown(report, setting, line))
        echo(f"written to {markdown}")
    return Outcome(report)
