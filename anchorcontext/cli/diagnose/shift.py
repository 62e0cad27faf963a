"""``anchorcontext diagnose shift``: RoPE's shift invariance, equations 4 and 5 of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from anchorcontext.precision.shift.settings import ShiftSettings

ALL = "bf16, fp16, fp32 or fp64, of pretrained: or random: weights"


@plain_command
@model_argument
@click.option("--preset", type=click.Choice(["quick", "paper"]), default="quick", show_default=True)
@click.option("--panels", metavar="P[,P...]", help="shift, token, length; all by default.")
@click.option(
    "--settings",
    metavar="S[,S...]",
    help=f"{ALL}, as in pretrained:bf16,random:bf16; given without --beside, nothing is beside.",
)
@click.option("--beside", metavar="S[,S...]", help="Settings measured at short lengths only.")
@click.option("--beside-tokens", type=int, metavar="T", help="The longest of these lengths.")
@click.option("--shifts", metavar="D[,D...]", help="Delta_1 of the panels shift and token.")
@click.option(
    "--reference", type=int, metavar="D", help="Delta_2, what all are compared with; default 16."
)
@click.option("--lengths", metavar="T[,T...]", help="Tokens of the panel length.")
@click.option("--length-shift", type=int, metavar="D", help="Delta_1 of this panel; default 0.")
@text_options(tokens="the preset's, in the panels shift and token", texts="the preset's")
@click.option(
    "--scores",
    type=click.Choice(["fp32", "model"]),
    help="Precision of scores and softmax: as FlashAttention (default), or as eager attention in "
    "the model's dtype.",
)
@click.option(
    "--same-input/--own-input",
    default=None,
    help="Give every shift the reference's input in each layer; by default its own.",
)
@click.option(
    "--extrapolate/--no-extrapolate",
    default=None,
    help="Allow positions past the trained length; by default in the preset paper only.",
)
@click.option("--device", metavar="NAME", help="cpu (default), or cuda.")
@threads_option
@result_options
def command(
    model: str,
    preset: str,
    threads: int | None,
    out: Path,
    stored: bool,
    figures: bool,
    markdown: Path | None,
    **given: Any,
) -> Outcome:
    """Measure how far attention changes when all position ids are shifted.

    RoPE's scores depend on distances alone, so a shift should change nothing. MODEL is a folder of
    Hugging Face weights. Two shifted forwards are walked layer by layer together; D (equation 4)
    sums the difference of their attention probabilities, D_logit (equation 5) averages that of
    their scores, by key column. What is not given is the preset's:

    \b
    quick  1,024 tokens, 6 shifts, lengths 64 to 1,024, 2 texts; beside fp64, to 256 tokens
    paper  figure 1 (hours on a CPU): 4,096 tokens, 19 shifts, lengths 64 to 8,192, 50 texts;
           beside fp16 and fp64, to 1,024 tokens
    """
    from dataclasses import asdict

    from anchorcontext.precision.shift.figures import draw_shift
    from anchorcontext.precision.shift.measure import run_shift, stored_results
    from anchorcontext.precision.shift.settings import check_settings
    from anchorcontext.precision.shift.sheet import shift_sheet
    from anchorcontext.precision.shift.summary import summarise, summary_report
    from anchorcontext.precision.workers import Workers

    settings = check_settings(read_settings(model, preset, given))
    if not stored:
        with Workers(threads) as workers, progress_bar() as tell:
            run_shift(settings, out, workers=workers, tell=tell)
    results = stored_results(settings, out)
    if not results:
        raise UserError(
            f"--out {out}: no text is complete there with these settings; run without --stored"
        )
    summary = summarise(settings, results)
    line = command_line("shift", model, {"preset": preset, **given})
    sheet = shift_sheet(summary, command=line)
    show(sheet, lambda: draw_shift(summary), out=out, figures=figures, markdown=markdown)
    return Outcome(asdict(sheet) | summary_report(summary))


def read_settings(model: str, preset: str, given: dict[str, Any]) -> ShiftSettings:
    """The preset's settings, with the options that were given in their place.

    Raises:
        UserError: a list that is none, an unknown setting.
    """
    from dataclasses import replace

    from anchorcontext.precision.models import Setting
    from anchorcontext.precision.shift.settings import PRESETS

    changes = given_lists(given, ("panels", "settings", "beside"), ("shifts", "lengths"))
    if "settings" in changes:
        changes.setdefault("beside", ())
    for name in {"settings", "beside"} & changes.keys():
        changes[name] = tuple(Setting.parse(part) for part in changes[name])
    return replace(PRESETS[preset], model=model, **changes)
