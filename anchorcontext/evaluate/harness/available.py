"""Which tasks can be made on this machine: their texts are here, or may be fetched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .catalog import RULER, STANDARD, RulerTask
from .require import hub, quiet, sentence_splitter
from .sources import Sources

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager


@dataclass
class Available:
    """Tasks by whose they are, and those whose texts are missing."""

    ruler: list[RulerTask] = field(default_factory=list)
    standard: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of the harness: name -> its loaded ``tasks`` and ``groups``."""
    missing: dict[str, str] = field(default_factory=dict)
    """Name -> why it cannot run here."""


def available_tasks(tasks: Sequence[str], sources: Sources) -> Available:
    """Load what can be made here, in the order asked; the rest is put on record."""
    found = Available()
    for name in tasks:
        if name in RULER:
            sentence_splitter(download=sources.download)
            reason = sources.missing(RULER[name].source)
            if reason is None:
                found.ruler.append(RULER[name])
            else:
                found.missing[name] = reason
            continue
        try:
            with hub(download=sources.download), quiet():
                loaded = _manager(name).load([name])
                found.standard[name] = {"tasks": loaded["tasks"], "groups": loaded["groups"]}
        except Exception as error:
            # The hub's client and the data sets' own scripts raise what they like; whatever it is,
            # the task cannot be scored here and must not count as 0.
            found.missing[name] = _why_not(name, error, download=sources.download)
    return found


def _why_not(name: str, error: Exception, *, download: bool) -> str:
    called = f" ({STANDARD[name]})" if name in STANDARD else ""
    offer = "" if download else "; --download fetches it"
    text = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    # Without --download nothing was asked of the hub: what its client says of that is no reason.
    reason = "" if not download and isinstance(error, OSError) else f": {text[:120]}"
    return f"its data set{called} is not on this machine{offer}{reason}"


@cache
def _manager(name: str) -> TaskManager:
    """The harness's index of the folder of a task known to be there; of all tasks for others."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    folder = Path(str(lm_eval.__file__)).parent / "tasks" / name
    if name in STANDARD and folder.is_dir():
        return TaskManager(include_path=str(folder), include_defaults=False)
    return TaskManager()
