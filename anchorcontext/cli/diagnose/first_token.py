"""``anchorcontext diagnose first-token``: the first key column, and why it stands out."""

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
    "--settings",
    metavar="S[,S...]",
    help="Weights and dtypes, default pretrained:bf16,pretrained:fp32,random:bf16.",
)
@click.option(
    "--arms",
    metavar="A[,A...]",
    help="plain, clamped, gap:N, moved:K, token:eos|frequent|random|none or an id.",
)
@click.option("--shifts", metavar="D,D", help="The reference's and the other one's; default 16,0.")
@text_options(tokens="1,024", texts="2")
@threads_option
@result_options
def command(
    model: str,
    threads: int | None,
    out: Path,
    stored: bool,
    figures: bool,
    markdown: Path | None,
    **given: Any,
) -> Outcome:
    """Ask why the first key column holds so much of D: large probability, or larger logit error.

    Two shifted forwards of MODEL are compared (equations 4 and 5), column by column: as they are;
    with nobody seeing the first token; with its position clamped while all others shift; further
    away; with BOS elsewhere; with other tokens in its place.
    """
    from dataclasses import asdict, replace

    from anchorcontext.precision.first_token.measure import (
        FirstTokenSettings,
        check_first_token_settings,
        run_first_token,
        stored_arms,
    )
    from anchorcontext.precision.first_token.sheet import draw_first_token, first_token_sheet
    from anchorcontext.precision.workers import Workers

    changes = given_lists(given, ("settings", "arms"), ("shifts",))
    settings = check_first_token_settings(replace(FirstTokenSettings(model), **changes))
    if not stored:
        with Workers(threads) as workers, progress_bar() as tell:
            run_first_token(settings, out, workers=workers, tell=tell)
    results, made = stored_arms(settings, out)
    if not results:
        raise UserError(f"--out {out}: nothing is stored with these settings; drop --stored")
    line = command_line("first-token", model, given)
    sheet = first_token_sheet(settings, results, command=line, made=made)
    show(sheet, lambda: draw_first_token(results), out=out, figures=figures, markdown=markdown)
    return Outcome(asdict(sheet))
