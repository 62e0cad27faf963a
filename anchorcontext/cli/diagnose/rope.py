"""``anchorcontext diagnose rope``: where attention rounds, stage by stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from anchorcontext.cli.common import Outcome, plain_command
from anchorcontext.cli.diagnose.common import (
    command_line,
    given_lists,
    model_argument,
    progress_bar,
    result_options,
    show,
    text_options,
    threads_option,
)
from anchorcontext.errors import UserError


@plain_command
@model_argument
@click.option(
    "--sources",
    metavar="S[,S...]",
    help="Whose heads: pretrained:bf16, random:bf16 and normal, normal numbers (default), or other "
    "weights and dtypes.",
)
@click.option("--layers", metavar="N[,N...]", help="Of models; default first, middle and last.")
@click.option("--heads", type=int, metavar="N", help="Query heads of a layer, default 3.")
@click.option(
    "--stacks",
    metavar="K:F[,K:F...]",
    help="Formats of the stages: eager, sdpa, rotation-fp32, tables-fp32, qk-fp32, quantised, all "
    "or a stage; of fp32, bf16, fp16, fp8_e4m3, fp8_e5m2.",
)
@click.option(
    "--offsets",
    metavar="P[,P...]",
    help="Positions of the first token; default 0,1024,16384,131072.",
)
@click.option("--shift", type=int, metavar="D", help="Of the twin, default 16.")
@text_options(tokens="512", texts="1")
@click.option("--deepspeed/--no-deepspeed", default=True, help="Also cast a model by DeepSpeed.")
@threads_option
@result_options
def command(
    model: str,
    deepspeed: bool,
    threads: int | None,
    out: Path,
    stored: bool,
    figures: bool,
    markdown: Path | None,
    **given: Any,
) -> Outcome:
    """Split attention's rounding error into the stages it comes from.

    Layers of MODEL hand out their q, k and v before RoPE; tables, rotation, dot product, softmax
    and values are then computed in fp64, each rounded to a format of its own. The total, against
    fp64 and against the same layer with all positions shifted, is split into the stages' parts,
    and that of sdpa:bf16 into the parts of bands of RoPE's frequencies, near and far.
    Also: position ids that a format cannot hold, and what casting a model does to inv_freq.
    """
    from dataclasses import asdict, replace

    from anchorcontext.precision.rope.casting import stored_casts
    from anchorcontext.precision.rope.figures import draw_rope
    from anchorcontext.precision.rope.measure import (
        RopeSettings,
        check_rope_settings,
        run_rope,
        stored_splits,
    )
    from anchorcontext.precision.rope.sheet import rope_sheet
    from anchorcontext.precision.workers import Workers

    changes = given_lists(given, ("sources", "stacks"), ("layers", "offsets"))
    settings = check_rope_settings(replace(RopeSettings(model), **changes))
    if not stored:
        with Workers(threads) as workers, progress_bar() as tell:
            run_rope(settings, out, workers=workers, tell=tell)
    splits, bands, made = stored_splits(settings, out)
    if not splits:
        raise UserError(f"--out {out}: nothing is stored with these settings; drop --stored")
    line = command_line("rope", model, given)
    casts = stored_casts(out, measure=not stored, deepspeed=deepspeed)
    sheet = rope_sheet(settings, splits, bands, casts, command=line, made=made)
    show(
        sheet,
        lambda: draw_rope(splits, settings.shift),
        out=out,
        figures=figures,
        markdown=markdown,
    )
    return Outcome(asdict(sheet))
