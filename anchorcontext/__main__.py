"""``python -m anchorcontext``: the command line, for launchers that start Python modules."""

from anchorcontext.cli import main

if __name__ == "__main__":
    main(prog_name="anchorcontext")
