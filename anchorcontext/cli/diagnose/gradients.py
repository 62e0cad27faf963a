"""``anchorcontext diagnose gradients``: what dtype, shifts and controls do to the gradient."""

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
)
from anchorcontext.errors import UserError


@plain_command
@model_argument
@click.option(
    "--arms",
    metavar="A[,A...]",
    help="DTYPE[+CONTROL...][@SHIFT], as in bf16,bf16@16,bf16+rope_tables+rotation; controls "
    "rope_tables, rotation, qk (in fp32) and weights (not rounded to bf16).",
)
@text_options(tokens="1,024", texts="2")
@result_options
def command(
    model: str,
    out: Path,
    stored: bool,
    figures: bool,
    markdown: Path | None,
    **given: Any,
) -> Outcome:
    """Compare gradients of a text's loss: bf16 with fp32, shifted with unshifted, by control.

    A difference in the forward says nothing about training; this one does. MODEL is trained for one
    backward as `train` would, layers recomputed, the loss in chunks; parameters, dq and dk are
    compared by cosine and norm, by layer and by group. Memory: the model and three gradients.
    """
    from dataclasses import asdict, replace

    from anchorcontext.precision.gradients.measure import (
        GradientSettings,
        check_gradient_settings,
        run_gradients,
        stored_gradients,
    )
    from anchorcontext.precision.gradients.sheet import draw_gradients, gradient_sheet

    changes = given_lists(given, ("arms",), ())
    settings = check_gradient_settings(replace(GradientSettings(model), **changes))
    if not stored:
        with progress_bar() as tell:
            run_gradients(settings, out, tell=tell)
    results, made = stored_gradients(settings, out)
    if not results:
        raise UserError(f"--out {out}: nothing is stored with these settings; drop --stored")
    line = command_line("gradients", model, given)
    sheet = gradient_sheet(settings, results, command=line, made=made)
    show(sheet, lambda: draw_gradients(results), out=out, figures=figures, markdown=markdown)
    return Outcome(asdict(sheet))
