"""How good a model is: held-out losses, loss by position, retrieval, averages, comparisons.

::

    probes.py      windows whose targets are told apart in groups
    tally.py       their losses, summed over all ranks, on live weights of any ZeRO stage
    loss.py        held-out windows at several context lengths
    documents.py   whole documents of the validation split
    positions.py   long documents: loss by position, and what the far context is worth
    needles.py     one number hidden in a haystack

    live.py        the three measures that a run takes between its steps

    target.py      a Hugging Face folder, a run, a checkpoint, snapshots
    lengths.py     4K is 4,096
    by_position.py models on disk, over the launcher's ranks
    average.py     the mean of snapshots' weights
    scores.py      scores in result files, and their means over snapshots
    compare.py, compare_page.py   runs side by side
    comparable.py  whether their losses are of the same tokens
    harness/       RULER and others, through lm-evaluation-harness

The first part knows nothing of a run: :mod:`anchorcontext.train.observers` calls it. The second
builds on all of training.
"""
