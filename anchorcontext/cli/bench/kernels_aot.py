"""``anchorcontext bench kernels-aot``: the Triton kernels' machine code, without a GPU."""

from __future__ import annotations

from pathlib import Path

import click

from anchorcontext.cli.bench.options import markdown_option
from anchorcontext.cli.common import Outcome, echo, is_main_rank, plain_command
from anchorcontext.errors import UserError


@plain_command
@click.option(
    "--head-dims", default="64,96,128,256", metavar="D,…", show_default=True, help="Head sizes."
)
@markdown_option("docs/kernels.md")
def kernels_aot(head_dims: str, markdown: Path | None) -> Outcome:
    """Compile the Triton kernels for sm_90 and sm_80: registers, spills, tensor-core code.

    Takes some minutes; what was compiled once comes from Triton's cache.
    """
    from anchorcontext.bench.kernels_aot import (
        bench_kernels_aot,
        kernels_aot_markdown,
        triton_release,
    )
    from anchorcontext.kernels.aot import HEAD_DIMS
    from anchorcontext.markdown import write_section

    parts = head_dims.split(",")
    if not all(part in map(str, HEAD_DIMS) for part in parts):
        known = ", ".join(map(str, HEAD_DIMS))
        raise UserError(f"--head-dims {head_dims}: give some of {known}, with commas between")
    results = bench_kernels_aot([int(part) for part in parts], echo)
    if markdown is not None and is_main_rank():
        line = f"anchorcontext bench kernels-aot --head-dims {head_dims} --markdown {markdown}"
        section = f"kernels-aot-{triton_release()}"
        write_section(markdown, section, kernels_aot_markdown(results, line))
        echo(f"written to {markdown}")
    return Outcome(results)
