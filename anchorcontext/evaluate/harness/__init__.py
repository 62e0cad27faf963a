"""RULER, LongBench, HellaSwag and MMLU through lm-evaluation-harness, the paper's way.

::

    catalog.py     the tasks by name, the presets, the published rows
    require.py     the extra, the hub's cache, the sentence splitter
    scoring.py     RULER's two scores, as its paper defines them
    sources.py     the haystack and the questions: local files, or what is cached
    available.py   which tasks can be made here
    ruler.py       prompts of RULER's tasks, made by the harness's own generators
    prompts.py     what the model reads: chat template, answer prefix, BOS; the length budget
    units.py       one model, one task, one length: stored whole, never computed twice
    progress.py    how far it is
    run.py         all units
    report.py      the tables

The harness (extra ``eval``) is imported only when a task of it runs.
"""
