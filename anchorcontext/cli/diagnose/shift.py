"""``anchorcontext diagnose shift``: RoPE's shift invariance, equations 4 and 5 of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from anchorcontext.cli.common import Outcome, echo, echo_table, is_main_rank, plain_command
from anchorcontext.cli.diagnose.common import (
    DEFAULT_OUT,
    command_line,
    model_argument,
    names,
    numbers,
    progress_bar,
)
from anchorcontext.errors import UserError

if TYPE_CHECKING:
    from anchorcontext.precision.shift.settings import ShiftSettings
    from anchorcontext.precision.shift.summary import ShiftSummary

ALL = "bf16, fp16, fp32 or fp64, of pretrained: or random: weights"


@plain_command
@model_argument
@click.option("--preset", type=click.Choice(["quick", "paper"]), default="quick", show_default=True)
@click.option("--panels", metavar="P[,P...]", help="shift, token, length; all by default.")
@click.option("--settings", metavar="S[,S...]", help=f"{ALL}, as in pretrained:bf16,random:bf16.")
@click.option("--beside", metavar="S[,S...]", help="Settings measured at short lengths only.")
@click.option("--beside-tokens", type=int, metavar="T", help="The longest of these lengths.")
@click.option("--tokens", type=int, metavar="T", help="Tokens of the panels shift and token.")
@click.option("--shifts", metavar="D[,D...]", help="Delta_1 of these panels.")
@click.option("--reference", type=int, metavar="D", help="Delta_2, what all are compared with.")
@click.option("--lengths", metavar="T[,T...]", help="Tokens of the panel length.")
@click.option("--length-shift", type=int, metavar="D", help="Delta_1 of this panel.")
@click.option("--texts", type=int, metavar="N", help="Sequences; more go on from those stored.")
@click.option("--source", metavar="PATH", help="Documents; by default the standard library's.")
@click.option("--seed", type=int, metavar="N", help="Of the texts' order and of random weights.")
@click.option(
    "--scores",
    type=click.Choice(["fp32", "model"]),
    help="Precision of scores and softmax: as FlashAttention, or as eager attention in the model's "
    "dtype.",
)
@click.option(
    "--same-input/--own-input",
    default=None,
    help="Give every shift the reference's input in each layer; by default its own.",
)
@click.option(
    "--extrapolate/--no-extrapolate",
    default=None,
    help="Allow positions past the trained length.",
)
@click.option("--device", metavar="NAME", help="cpu, or cuda.")
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="CPU threads.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=DEFAULT_OUT,
    show_default=True,
    help="Where results are kept.",
)
@click.option("--stored", is_flag=True, help="Measure nothing; show what is stored.")
@click.option(
    "--figures",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Draw the panels there, as PNG and SVG.",
)
@click.option(
    "--markdown",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="PATH",
    help="Write the table into its section of PATH, docs/precision.md, and figures beside it.",
)
def command(
    model: str,
    preset: str,
    threads: int | None,
    out: Path,
    stored: bool,
    figures: Path | None,
    markdown: Path | None,
    **given: Any,
) -> Outcome:
    """Measure how far attention changes when all position ids are shifted.

    RoPE's scores depend on distances alone, so a shift should change nothing. MODEL is a folder of
    Hugging Face weights. Two shifted forwards are walked layer by layer together; D (equation 4)
    sums the difference of their attention probabilities, D_logit (equation 5) averages that of
    their scores, by key column. The preset paper has the settings of figure 1 (50 texts: hours on
    a CPU); every part of it can be set.
    """
    from anchorcontext.precision.shift.measure import run_shift, stored_results
    from anchorcontext.precision.shift.settings import check_settings
    from anchorcontext.precision.shift.summary import (
        HEADERS,
        summarise,
        summary_report,
        summary_rows,
    )
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
    texts = ", ".join(f"{len(domains)} ({kind})" for kind, domains in summary.domains.items())
    title = f"{model}: texts {texts}; shifts are compared with {settings.reference}"
    echo_table(summary_rows(summary), HEADERS, title=title)
    if is_main_rank():
        line = command_line("shift", model, {"preset": preset, **given})
        _leave_sheet(summary, line, out, _write(summary, figures, markdown, line))
    return Outcome(summary_report(summary))


def read_settings(model: str, preset: str, given: dict[str, Any]) -> ShiftSettings:
    """The preset's settings, with the options that were given in their place.

    Raises:
        UserError: a list that is none, an unknown setting.
    """
    from dataclasses import replace

    from anchorcontext.precision.models import Setting
    from anchorcontext.precision.shift.settings import PRESETS

    changes: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        option = f"--{name.replace('_', '-')}"
        if name in ("settings", "beside"):
            changes[name] = tuple(Setting.parse(part) for part in names(value))
        elif name in ("shifts", "lengths"):
            changes[name] = numbers(option, value)
        else:
            changes[name] = names(value) if name == "panels" else value
    return replace(PRESETS[preset], model=model, **changes)


def _write(
    summary: ShiftSummary, figures: Path | None, markdown: Path | None, line: str
) -> list[Path]:
    from anchorcontext.markdown import write_section
    from anchorcontext.precision.shift.figures import draw_figures
    from anchorcontext.precision.shift.page import shift_markdown

    if markdown is not None and figures is None:
        figures = markdown.with_suffix("")  # docs/precision.md -> docs/precision/
    drawn = draw_figures(summary, figures) if figures is not None else []
    for path in drawn:
        echo(f"drawn to {path}")
    if markdown is not None:
        write_section(markdown, "shift", shift_markdown(summary, line, drawn, markdown.parent))
        echo(f"written to {markdown}")
    return drawn


def _leave_sheet(summary: ShiftSummary, line: str, out: Path, drawn: list[Path]) -> None:
    """For ``diagnose report``: the sheet and its figures, those of ``drawn`` or new ones."""
    from anchorcontext.precision.sheet import FIGURES, copy_figures, save_sheet
    from anchorcontext.precision.shift.figures import draw_figures
    from anchorcontext.precision.shift.sheet import shift_sheet

    stems = [path.stem for path in drawn]
    save_sheet(shift_sheet(summary, line, stems), out)
    if drawn:
        copy_figures(drawn, out / FIGURES)
        return
    try:
        stems = [path.stem for path in draw_figures(summary, out / FIGURES)]
    except UserError as error:
        echo(f"the report will have no figures: {error}")
    save_sheet(shift_sheet(summary, line, stems), out)
