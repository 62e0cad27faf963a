"""``diagnose gradients``: the gradient in bf16 against fp32, by shift and by control.

::

    compare.py     gradients of a text, and how far two are apart
    measure.py     the arms: dtype, controls, shift
    sheet.py       tables, readings and figures
"""
