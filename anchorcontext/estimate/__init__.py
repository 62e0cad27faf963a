"""Before any device is held: memory, work, traffic and time of a configured run, in closed form.

::

    worlds.py      how many ranks the recipe divides over
    shape.py       the model's sizes
    windows.py     what is planned
    links.py       bytes between ranks
    memory.py      what a rank holds
    time.py        how long a step takes
    report.py      all of it, for every mode and world
    resources.py   whether a run that starts has the room it needs

``docs/planning.md`` derives every term.
"""
