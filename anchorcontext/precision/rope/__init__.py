"""``diagnose rope``: attention's rounding error, split into the stages it comes from.

::

    formats.py     number formats, simulated
    stages.py      attention with a format at every stage
    parts.py       a deviation split into what the stages add
    bands.py       frequencies in bands, and how q and k lie in them
    measure.py     the split, on captured heads
    casting.py     what casting a model does to inv_freq
    sheet.py       tables and readings
    band_sheet.py  those of bands
    figures.py     drawn
"""
