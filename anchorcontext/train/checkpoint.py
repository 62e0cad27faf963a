"""Atomic checkpoints: a folder is complete or it does not count.

::

    checkpoints/
      step-000010/            complete: written as step-000010.tmp, synced, then renamed
        manifest.json         step, world layout, versions, every file with its size; written last
        trainer.json          data position and what else the loop needs
        config.yaml           the resolved config
        engine/               DeepSpeed: weights, optimiser state, schedule, per-rank ZeRO shards
        ranks/rank-00000.pt   random number generators of each rank
      step-000020.tmp/        torn: a crash during writing; ignored, and removed by the next save

No file points to the latest checkpoint: the latest is the complete folder with the highest step.
The folder must be one that all ranks see.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shutil
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..config import Config, save_config
from ..errors import UserError
from .control import Control

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
ENGINE_TAG = "engine"
BESIDE = ".tmp"


@dataclass(frozen=True)
class WorldLayout:
    """What the sharded state of a checkpoint fits: it can be loaded into an equal layout only."""

    world_size: int
    sp: int
    zero_stage: int
    dtype: str

    @classmethod
    def of(cls, config: Config, world_size: int) -> WorldLayout:
        """The layout of a run."""
        return cls(world_size, config.parallel.sp, config.train.zero_stage, config.model.dtype)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return int(self.manifest["step"])

    @property
    def layout(self) -> WorldLayout:
        """The ranks and stage that wrote it."""
        return WorldLayout(**self.manifest["layout"])

    def trainer_state(self) -> dict[str, Any]:
        """What the loop saved beside the engine."""
        return dict(json.loads((self.path / "trainer.json").read_text()))


def find_checkpoints(folder: Path) -> tuple[list[Checkpoint], list[str]]:
    """The complete checkpoints of ``folder`` by step, and what is torn there, with the reason."""
    complete, torn = [], []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if not re.fullmatch(rf"step-\d+({re.escape(BESIDE)})?", path.name):
            continue
        try:
            complete.append(read_checkpoint(path))
        except UserError as error:
            torn.append(str(error))
    return sorted(complete, key=lambda checkpoint: checkpoint.step), torn


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in ``path``.

    Raises:
        UserError: it is not complete; the message says what is missing.
    """
    if path.name.endswith(BESIDE):
        raise UserError(f"{path}: was not written to its end")
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: its {MANIFEST} cannot be read: {error}") from None
    for name, size in manifest["files"].items():
        file = path / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes"
            raise UserError(f"{path}: {name} {what}, {size} bytes were written")
    return Checkpoint(path, manifest)


def damage(files: Iterable[Path]) -> str | None:
    """What is wrong with the first of ``files`` whose content is not what was written.

    torch writes zip archives with a CRC-32 of every member; a flipped bit keeps the size.
    """
    for file in sorted(files):
        if file.suffix != ".pt":
            continue
        try:
            with zipfile.ZipFile(file) as archive:
                member = archive.testzip()
        except (OSError, zipfile.BadZipFile, zlib.error, EOFError) as error:
            return f"{file} cannot be read: {error}"
        if member is not None:
            return f"{file}: {member} does not match its checksum"
    return None


def check_layout(checkpoint: Checkpoint, layout: WorldLayout) -> None:
    """Refuse a checkpoint whose shards are cut for other ranks.

    Raises:
        UserError: names what differs, and what would be needed.
    """
    saved, wanted = vars(checkpoint.layout), vars(layout)
    changes = [f"{k} {saved[k]} -> {wanted[k]}" for k in wanted if saved[k] != wanted[k]]
    if changes:
        raise UserError(
            f"{checkpoint.path}: was written by another layout of ranks ({', '.join(changes)}), "
            "and its optimiser state is cut for that one; resume with the saved values, or export "
            "it and start a new run from the exported model"
        )


class CheckpointStore:
    """The checkpoints of one run. Every method is collective."""

    def __init__(self, folder: Path, control: Control, layout: WorldLayout, config: Config) -> None:
        self.folder = folder
        self.control = control
        self.layout = layout
        self.config = config

    def save(self, engine: DeepSpeedEngine, step: int, trainer_state: dict[str, Any]) -> Path:
        """Write the checkpoint of ``step``; the previous ones stay until it is complete."""
        final = self.folder / f"step-{step:06d}"
        beside = final.with_name(final.name + BESIDE)
        with self.control.together("preparing the checkpoint folder"):
            if self.control.rank == 0:
                self._remove_torn()
                (beside / "ranks").mkdir(parents=True)
                (beside / "trainer.json").write_text(json.dumps(trainer_state, indent=2))
                save_config(self.config, beside / "config.yaml")
        engine.save_checkpoint(
            str(beside),
            tag=ENGINE_TAG,
            save_latest=False,
            client_state={"anchorcontext_parameter_groups": _parameter_names(engine)},
        )
        with self.control.together("writing the checkpoint"):
            torch.save(_random_states(engine.device), beside / "ranks" / _rank_file(self.control))
            for file in _files_of_rank(beside, self.control.rank):
                _sync(file)
        with self.control.together("completing the checkpoint"):
            if self.control.rank == 0:
                self._complete(beside, final, step)
        return final

    def latest(self) -> Checkpoint | None:
        """The intact checkpoint with the highest step; torn and damaged ones are named in the log.

        Rank 0 looks and tells the others, so that no two ranks resume from different ones; each
        rank reads the files it wrote once, against their checksums.

        Raises:
            UserError: there are complete checkpoints, and every one of them is damaged.
        """
        paths: list[Path] = []
        with self.control.together(f"looking for checkpoints in {self.folder}"):
            if self.control.rank == 0:
                complete, torn = find_checkpoints(self.folder)
                for reason in torn:
                    logger.warning("ignoring an incomplete checkpoint: %s", reason)
                paths = [checkpoint.path for checkpoint in reversed(complete)]
        paths = self.control.from_first(paths)
        for path in paths:
            with self.control.together("reading the checkpoint"):
                found = read_checkpoint(path)
                mine = damage(_files_of_rank(path, self.control.rank))
            damaged = [reason for reason in self.control.gather(mine) if reason]
            if not damaged:
                return found
            if self.control.rank == 0:
                logger.warning("ignoring a damaged checkpoint: %s", damaged[0])
        if paths:
            raise UserError(
                f"{self.folder}: every checkpoint is damaged ({damaged[0]}); restore one from a "
                "copy, or remove the folder to start anew"
            )
        return None

    def load(self, engine: DeepSpeedEngine, checkpoint: Checkpoint) -> dict[str, Any]:
        """Put engine, schedule and random number generators into the saved state.

        Returns:
            The loop's own state, as given to ``save``.

        Raises:
            UserError: the checkpoint was written by another layout of ranks.
        """
        with self.control.together("loading the checkpoint"):
            check_layout(checkpoint, self.layout)
            state = checkpoint.trainer_state()
            generators = torch.load(
                checkpoint.path / "ranks" / _rank_file(self.control), weights_only=False
            )
        loaded, _ = engine.load_checkpoint(str(checkpoint.path), tag=ENGINE_TAG)
        assert loaded is not None, f"DeepSpeed found no checkpoint in {checkpoint.path}"
        _restore_random_states(generators, engine.device)
        return state

    def _complete(self, beside: Path, final: Path, step: int) -> None:
        """Manifest, rename, and only then the old ones."""
        files = {
            str(file.relative_to(beside)): file.stat().st_size
            for file in sorted(beside.rglob("*"))
            if file.is_file()
        }
        manifest = {
            "format": FORMAT,
            "step": step,
            "layout": vars(self.layout),
            "versions": _versions(),
            "files": files,
        }
        (beside / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        for path in (beside / MANIFEST, *(p for p in beside.rglob("*") if p.is_dir()), beside):
            _sync(path)
        if final.exists():
            # A torn one of the same step: nothing complete is ever overwritten.
            _discard(final)
        beside.rename(final)
        _sync(self.folder)
        complete, _ = find_checkpoints(self.folder)
        for old in complete[: -self.config.checkpoint.keep]:
            _discard(old.path)

    def _remove_torn(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob(f"step-*{BESIDE}"):
            shutil.rmtree(path)


def _discard(path: Path) -> None:
    """Delete a checkpoint in such a way that a crash half-way leaves no folder that looks whole."""
    grave = path.with_name(f"{path.name}.old{BESIDE}")
    path.rename(grave)
    shutil.rmtree(grave)


def _files_of_rank(folder: Path, rank: int) -> Iterator[Path]:
    """The files that this rank wrote; rank 0 also takes those that carry no rank."""
    for file in folder.rglob("*"):
        if not file.is_file():
            continue
        match = re.search(r"pp_rank_(\d+)_|rank-(\d+)\.pt$", file.name)
        owner = int(match.group(1) or match.group(2)) if match else 0
        if owner == rank:
            yield file


def _rank_file(control: Control) -> str:
    return f"rank-{control.rank:05d}.pt"


def _sync(path: Path) -> None:
    """Put a file or folder onto the disk, past the page cache."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _parameter_names(engine: DeepSpeedEngine) -> list[list[str]]:
    """Names in the optimiser's order, where its state has none (bf16 masters without ZeRO)."""
    groups = getattr(engine.optimizer, "fp16_groups", None)
    if groups is None or engine.zero_optimization_stage() > 0:
        return []
    return [[engine.param_names[parameter] for parameter in group] for group in groups]


def _random_states(device: torch.device) -> dict[str, Any]:
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _restore_random_states(states: dict[str, Any], device: torch.device) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def _versions() -> dict[str, str]:
    import deepspeed
    import transformers

    from .. import __version__

    return {
        "anchorcontext": __version__,
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "transformers": transformers.__version__,
    }
