"""Results that are small, kept as JSON: one file a unit of work, written whole or not at all.

::

    OUT/rope/pretrained-bf16-layer-0-sdpa-bf16-offset-0-1f0c2a9d77e1.json

The file's name ends in a fingerprint of everything that decides its numbers, so a run that was
killed, or that is asked for more, computes what is missing and nothing twice.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..environment import measured_on
from ..errors import writing
from ..files import written_whole

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Unit:
    """One piece of work: a readable name, the facts that decide its numbers, its share of time."""

    name: str
    facts: Mapping[str, Any]
    work: float = 1.0


class Work(Protocol):
    """What :class:`Progress` needs to know of a unit."""

    @property
    def name(self) -> str:
        """Readable."""

    @property
    def work(self) -> float:
        """Its share of the time, in no unit."""


@dataclass(frozen=True)
class Step:
    """Where a run stands: the unit at hand, work done and in all; ``stored`` when it is kept."""

    name: str
    done: float
    total: float
    stored: bool = False


Tell = Callable[[Step], None]


class UnitStore:
    """The units of one diagnosis under OUT."""

    def __init__(self, out: Path, diagnosis: str, version: int) -> None:
        """``version``: raised when what is stored, or how it is computed, changes."""
        self.folder = out / diagnosis
        self.version = version

    def path(self, unit: Unit) -> Path:
        """Where the result of ``unit`` lies."""
        facts = json.dumps({"version": self.version, **unit.facts}, sort_keys=True, default=str)
        fingerprint = hashlib.blake2b(facts.encode(), digest_size=6).hexdigest()
        name = re.sub(r"[^A-Za-z0-9._]+", "-", unit.name)
        return self.folder / f"{name}-{fingerprint}.json"

    def load(self, unit: Unit) -> dict[str, Any] | None:
        """The result; None: not there, or damaged."""
        path = self.path(unit)
        try:
            found: dict[str, Any] = json.loads(path.read_text())["result"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s cannot be read (%s): measured again", path, error)
            return None
        return found

    def missing(self, units: Iterable[Unit]) -> list[Unit]:
        """Units without a result."""
        return [unit for unit in units if self.load(unit) is None]

    def save(self, unit: Unit, result: Mapping[str, Any]) -> None:
        """Keep JSON types and NumPy arrays.

        Raises:
            UserError: the folder cannot be written.
        """
        write_whole(self.path(unit), {"facts": unit.facts, "made": made_by(), "result": result})

    def made(self, units: Iterable[Unit]) -> list[str]:
        """Where and with what the stored units were measured, each once."""
        found = set()
        for unit in units:
            path = self.path(unit)
            if path.exists():
                found.add(json.loads(path.read_text()).get("made", "unknown"))
        return sorted(found)


class Progress:
    """Adds up the work of a run's units and tells where it stands."""

    def __init__(self, units: Iterable[Work], tell: Tell | None) -> None:
        self.total = sum(unit.work for unit in units)
        self.done = 0.0
        self.tell = tell

    def at(self, unit: Work, part: float = 0.0) -> None:
        """``part`` of ``unit`` is done."""
        if self.tell is not None:
            self.tell(Step(unit.name, self.done + part * unit.work, self.total))

    def stored(self, unit: Work) -> None:
        """``unit`` is done and kept."""
        self.done += unit.work
        if self.tell is not None:
            self.tell(Step(unit.name, self.done, self.total, stored=True))


def write_whole(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON beside and rename. NaN stays NaN, which Python's ``json`` reads back.

    Raises:
        UserError: the folder cannot be written.
    """
    text = json.dumps(content, indent=1, default=lambda array: array.tolist())
    with writing("--out", path), written_whole(path) as beside:
        beside.write_text(text + "\n")


def made_by(device: torch.device | None = None) -> str:
    """Processor or GPU, versions and date of a measurement."""
    return f"{measured_on(device)}, transformers {importlib.metadata.version('transformers')}"
