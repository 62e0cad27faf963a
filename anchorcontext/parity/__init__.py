"""The distributed run against one device: logits, loss and every parameter's gradient.

Read in this order: ``check`` (what is compared), ``live`` (the distributed side), ``baseline`` (the
one device), ``compare`` (differences in chunks), ``tolerances`` and ``report`` (the verdict).
"""
