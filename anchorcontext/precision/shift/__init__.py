"""``diagnose shift``: RoPE's shift invariance, equations 4 and 5 of the paper.

::

    settings.py    what is measured; presets
    store.py       results on disk, one file a walk and text
    measure.py     measure what is missing, read what is stored
    summary.py     means over texts
    figures.py     panels drawn from them
    sheet.py       tables and readings
"""
