"""The precision laboratory: does low precision break RoPE's shift invariance, where, how much.

::

    models.py       pretrained models and random twins in four dtypes
    checks.py       settings that no diagnosis can measure
    texts.py        token sequences from real documents
    workers.py      threads that each compute alone
    rotary.py       RoPE tables and norms in fp64, from outside
    walk.py         variants of one forward, layer by layer together
    difference.py   how their attention differs, by key column, streamed
    measures.py     equations 4 and 5 of the paper

    units.py        results on disk, one file a unit of work
    sheet.py        what a diagnosis shows: readings, tables, figures
    report.py       all sheets of a folder on one HTML page

    shift/          `diagnose shift`: attention under shifted positions
    rope/           `diagnose rope`: which stage of attention rounds how much
    first_token/    `diagnose first-token`: sink mass or larger error
    gradients/      `diagnose gradients`: what it does to the gradient

A diagnosis is a folder: settings, what is measured, and its sheet.
"""

from .difference import SUMS, LayerDifferences, attention_differences, attention_rows
from .measures import FORMS, WEIGHTS, Deviation, DeviationSum, column_bins, rows_of
from .models import DTYPES, Setting, lab_model, read_config
from .rotary import ExactRotary, Rotary, exact_norms
from .walk import LayerAttention, LayerStates, Variant, check_walkable, walk
from .workers import Workers

__all__ = [
    "DTYPES",
    "FORMS",
    "SUMS",
    "WEIGHTS",
    "Deviation",
    "DeviationSum",
    "ExactRotary",
    "LayerAttention",
    "LayerDifferences",
    "LayerStates",
    "Rotary",
    "Setting",
    "Variant",
    "Workers",
    "attention_differences",
    "attention_rows",
    "check_walkable",
    "column_bins",
    "exact_norms",
    "lab_model",
    "read_config",
    "rows_of",
    "walk",
]
