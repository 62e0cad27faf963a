"""The precision laboratory: does low precision break RoPE's shift invariance, where, how much.

::

    workers.py      threads that each compute alone
    rotary.py       RoPE tables and norms in fp64, from outside
    walk.py         variants of one forward, layer by layer together
    difference.py   how their attention differs, by key column, streamed
    measures.py     equations 4 and 5 of the paper
    models.py       pretrained models and random twins in four dtypes
    texts.py        token sequences from real documents
    settings.py     what `diagnose shift` measures; presets
    store.py        results on disk, one file a walk and text
    shift.py        `diagnose shift`: measure what is missing, read what is stored
    summary.py, figures.py, page.py   means over texts; drawn; as Markdown
    formats.py      number formats, simulated
    stages.py       attention with a format at every stage
    parts.py        a deviation split into what the stages add
    casting.py      what casting a model does to inv_freq
    rope.py         `diagnose rope`: the split, on captured heads
    units.py, sheet.py   small results on disk; what a diagnosis shows
    rope_sheet.py, rope_figures.py   its tables, readings and figures
    arms.py, first_token.py, first_token_sheet.py   `diagnose first-token`, the same way
    gradients.py, gradient_arms.py, gradient_sheet.py   `diagnose gradients`
    shift_sheet.py, report.py   readings of `diagnose shift`; all on one HTML page
"""

from .difference import SUMS, LayerDifferences, attention_differences, attention_rows
from .measures import FORMS, WEIGHTS, Deviation, DeviationSum, column_bins, rows_of
from .models import DTYPES, Setting, lab_model, model_digest, read_config
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
    "model_digest",
    "read_config",
    "rows_of",
    "walk",
]
