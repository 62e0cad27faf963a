"""What made a run: the commit of the code."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
from pathlib import Path

_GIT_SECONDS = 10.0


def git_commit(folder: str | Path | None = None) -> str | None:
    """The commit of the code in ``folder``, with ``-dirty`` where tracked files differ from it.

    Args:
        folder: default: this package, of which pip may also know the commit (PEP 610).

    Returns:
        40 hex digits, or None: no checkout, or git is not there to ask.
    """
    here = Path(folder or __file__).resolve()
    here = here if here.is_dir() else here.parent
    # An installed package may lie in somebody else's checkout: only tracked files count.
    if _git(here, "ls-files", "--", "."):
        return _git(here, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return _installed_commit() if folder is None else None


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _installed_commit() -> str | None:
    try:
        text = importlib.metadata.distribution("anchorcontext").read_text("direct_url.json")
        return str(json.loads(text or "{}")["vcs_info"]["commit_id"])
    except (importlib.metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        return None
