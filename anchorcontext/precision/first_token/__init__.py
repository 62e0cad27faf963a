"""``diagnose first-token``: why the first key column stands out.

::

    arms.py        what the first token is, where it stands, who moves
    measure.py     the deviations of every arm
    sheet.py       tables, readings and figures
"""
