"""Checkpoint folders on disk: which are complete, which are torn, what is damaged.

::

    checkpoints/
      step-000010/            complete: written as step-000010.tmp, synced, then renamed
        manifest.json         step, world layout, versions, every file with its size; written last
        trainer.json          data position and what else the loop needs
        config.yaml           the resolved config
        hf/                   config and generation config of the model, for export
        engine/               DeepSpeed: weights, optimiser state, schedule, per-rank ZeRO shards
        ranks/rank-00000.pt   random number generators of each rank
      step-000020.tmp/        torn: a crash during writing; ignored, and removed by the next save

No file points to the latest checkpoint: the latest is the complete folder with the highest step.
The folder must be one that all ranks see.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import Config
from ..config.deepspeed import optimizer_device
from ..errors import UserError

FORMAT = 2
MANIFEST, TRAINER, CONFIG = "manifest.json", "trainer.json", "config.yaml"
ENGINE_TAG, RANKS, HF = "engine", "ranks", "hf"
BESIDE = ".tmp"


@dataclass(frozen=True)
class WorldLayout:
    """How the sharded state of a checkpoint is cut."""

    world_size: int
    sp: int
    zero_stage: int
    dtype: str
    optimizer_device: str = "none"
    """Where the optimiser's state is offloaded to: DeepSpeed then takes other optimisers."""

    @classmethod
    def of(cls, config: Config, world_size: int) -> WorldLayout:
        """The layout of a run."""
        train, dtype = config.train, config.model.dtype
        sp, device = config.parallel.sp, optimizer_device(config)
        return cls(world_size, sp, train.zero_stage, dtype, device)

    def changes_to(self, other: WorldLayout) -> list[str]:
        """What differs, as ``name before -> after``."""
        before, after = vars(self), vars(other)
        return [f"{k} {before[k]} -> {after[k]}" for k in after if before[k] != after[k]]


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
        return dict(json.loads((self.path / TRAINER).read_text()))


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


def find_checkpoint(source: Path) -> Path:
    """The checkpoint folder meant by a checkpoint, a run or its ``checkpoints`` folder.

    Raises:
        UserError: there is no complete checkpoint.
    """
    if (source / MANIFEST).is_file():
        return source
    folder = source / "checkpoints" if (source / "checkpoints").is_dir() else source
    complete, torn = find_checkpoints(folder)
    if not complete:
        reason = f" ({'; '.join(torn)})" if torn else ""
        raise UserError(
            f"{source} holds no complete checkpoint{reason}: give a run's folder or one of its "
            "checkpoints, and train with checkpoint.final or checkpoint.every"
        )
    return complete[-1].path


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in ``path``, its small files compared with their checksums.

    Raises:
        UserError: it is not complete, or of another version; the message says what is wrong.
    """
    if path.name.endswith(BESIDE):
        raise UserError(f"{path}: was not written to its end")
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        found, files = manifest["format"], manifest["files"]
        intact = manifest.pop("crc32") == _checksum(_encoded(manifest))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: its {MANIFEST} cannot be read: {error}") from None
    if found != FORMAT:
        raise UserError(f"{path}: has format {found}, this anchorcontext reads {FORMAT}")
    if not intact:
        raise UserError(f"{path}: its {MANIFEST} does not match its checksum")
    for name, (size, checksum) in files.items():
        try:
            _check_file(path / name, size, checksum)
        except OSError as error:  # what a broken disk answers
            raise UserError(f"{path}: {name} cannot be read: {error.strerror or error}") from None
    return Checkpoint(path, manifest)


def write_manifest(folder: Path, values: dict[str, Any]) -> None:
    """Complete ``folder``: list its files with sizes and checksums, and put it onto the disk.

    Archives of torch are synced already by those who wrote them, and carry checksums of their own,
    which :func:`damage` compares.
    """
    files = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        checksum = None if file.suffix == ".pt" else _checksum(file.read_bytes())
        files[str(file.relative_to(folder))] = (file.stat().st_size, checksum)
        if checksum is not None:
            sync(file)
    manifest = json.loads(json.dumps({"format": FORMAT, **values, "files": files}))
    text = json.dumps({**manifest, "crc32": _checksum(_encoded(manifest))}, indent=2)
    (folder / MANIFEST).write_text(text + "\n")
    for path in (folder / MANIFEST, *(p for p in folder.rglob("*") if p.is_dir()), folder):
        sync(path)


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


def files_of_rank(folder: Path, rank: int, world_size: int) -> Iterator[Path]:
    """This rank's share of a checkpoint's files: what it wrote, dealt anew to other numbers of
    ranks. Rank 0 also takes those that carry no rank."""
    for file in folder.rglob("*"):
        if not file.is_file():
            continue
        match = re.search(r"pp_rank_(\d+)_|rank-(\d+)\.pt$", file.name)
        owner = int(match.group(1) or match.group(2)) if match else 0
        if owner % world_size == rank:
            yield file


def discard(path: Path) -> None:
    """Delete a checkpoint in such a way that a crash half-way leaves no folder that looks whole."""
    grave = path.with_name(f"{path.name}.old{BESIDE}")
    path.rename(grave)
    shutil.rmtree(grave)


def sync(path: Path) -> None:
    """Put a file or folder onto the disk, past the page cache."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _check_file(file: Path, size: int, checksum: int | None) -> None:
    found = file.stat().st_size if file.is_file() else None
    where = f"{file.parent}: {file.name}"
    if found != size:
        what = "is missing" if found is None else f"has {found} bytes"
        raise UserError(f"{where} {what}, {size} bytes were written")
    if checksum is not None and _checksum(file.read_bytes()) != checksum:
        raise UserError(f"{where} does not match its checksum")


def _checksum(content: bytes) -> int:
    return zlib.crc32(content)


def _encoded(manifest: dict[str, Any]) -> bytes:
    return json.dumps(manifest, sort_keys=True).encode()
