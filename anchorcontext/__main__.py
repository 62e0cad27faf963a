"""``python -m anchorcontext``: the command line, for launchers that start Python modules."""

import sys
from pathlib import Path


def leave_checkout() -> None:
    """Take a checkout's root off ``sys.path``, where ``-m`` put it when started there.

    Its ``kernels/`` would pass for the Hugging Face package of that name, which transformers and
    others look for. ``PYTHONSAFEPATH=1`` has the same effect from the start.
    """
    root = Path(__file__).resolve().parent.parent
    if (root / "kernels" / "interface.py").exists():
        sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != root]


if __name__ == "__main__":
    leave_checkout()
    from anchorcontext.cli import main

    main(prog_name="anchorcontext")
