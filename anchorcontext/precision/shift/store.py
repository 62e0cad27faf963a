"""Results on disk: one file a walk and text, written whole or not at all.

::

    OUT/pretrained-bf16-shift-3f2a91c04d5e/text-000.npz

The folder's name carries a fingerprint of all that decides the numbers but the text; the file holds
a fingerprint of its text. A run that was killed, or that is asked for more texts, computes what is
missing. Arrays by column are kept in fp32, sums in fp64.
"""

from __future__ import annotations

import json
import logging
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import writing
from ...files import written_whole
from ..measures import Deviation
from .settings import Walk

logger = logging.getLogger(__name__)
BY_COLUMN = ("columns", "logits", "layer_columns", "mass")


@dataclass(frozen=True)
class WalkResult:
    """What a walk over one text found: deviations by (shift, length), and facts about the run.

    ``facts``: ``text`` number, ``domain``, ``document`` and ``digest``, ``threads``, ``made`` (see
    :func:`~..units.made_by`), ``seconds`` on the clock and, as ``processor_seconds``, of the
    processor, which the oldest results lack.
    """

    deviations: Mapping[tuple[int, int], Deviation]
    facts: dict[str, Any]


class ResultStore:
    """The results under one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, walk: Walk, fingerprint: str, text: int) -> Path:
        """Where the walk's result over text number ``text`` lies."""
        setting = str(walk.setting).replace(":", "-")
        return self.folder / f"{setting}-{walk.kind}-{fingerprint}" / f"text-{text:03d}.npz"

    def save(self, path: Path, walk: Walk, result: WalkResult) -> None:
        """Write beside and rename: a killed run leaves the file whole or does not leave one."""
        arrays: dict[str, Any] = {"facts": np.array(json.dumps(result.facts))}
        for number, pair in enumerate(walk.pairs):
            for name, array in vars(result.deviations[pair]).items():
                kept = array.astype(np.float32) if name in BY_COLUMN else array
                arrays[f"{number}.{name}"] = kept
        with (
            writing("--out", path),
            written_whole(path) as beside,
            beside.open("wb") as stream,
        ):
            np.savez_compressed(stream, **arrays)

    def load(self, path: Path, walk: Walk, digest: str | None = None) -> WalkResult | None:
        """The result in ``path``; None: not there, damaged, or of a text of another digest."""
        if not path.exists():
            return None
        try:
            with np.load(path) as arrays:
                facts = _with_made(json.loads(str(arrays["facts"])))
                if digest is not None and facts["digest"] != digest:
                    logger.warning("%s was measured on another text: measured again", path)
                    return None
                deviations = {
                    pair: Deviation(
                        **{
                            field.name: arrays[f"{number}.{field.name}"].astype(np.float64)
                            for field in fields(Deviation)
                        }
                    )
                    for number, pair in enumerate(walk.pairs)
                }
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            logger.warning("%s cannot be read (%s): measured again", path, error)
            return None
        return WalkResult(deviations, facts)


def _with_made(facts: dict[str, Any]) -> dict[str, Any]:
    """``facts`` with ``made``, of which older results hold the parts one by one."""
    if "made" not in facts:
        machine = f"{facts['machine']} {facts['device'].upper()}"
        versions = f"torch {facts['torch']}, {facts['date']}, transformers {facts['transformers']}"
        facts["made"] = f"{machine}, {versions}"
    return facts
