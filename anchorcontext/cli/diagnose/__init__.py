"""``anchorcontext diagnose NAME``: the precision laboratory, one module a measurement."""

from __future__ import annotations

import click

from anchorcontext.cli.lazy import LazyGroup

DIAGNOSES = {
    "shift": "Does attention change when all positions are shifted? Equations 4 and 5.",
    "rope": "Which stage of attention rounds how much; positions and inv_freq in low precision.",
    "first-token": "Why the first key column stands out: probability, or larger logit error.",
    "gradients": "What dtype, shifts and precision controls do to the gradient that trains.",
    "report": "All of that on one HTML page.",
}


@click.group(
    cls=LazyGroup,
    listed=DIAGNOSES,
    package=__name__,
    context_settings={"help_option_names": ["-h", "--help"]},
)
def command() -> None:
    """What low precision does to RoPE and attention: where, how much, and on which token.

    Each takes --json PATH. Results are kept in a folder, and a killed run goes on.
    """
