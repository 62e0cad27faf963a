"""Atomic checkpoints: a folder is complete or it does not count; see :mod:`.checkpoint_files`."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..config import Config, save_config
from ..errors import UserError
from .checkpoint_files import (
    BESIDE,
    CONFIG,
    ENGINE_TAG,
    HF,
    RANKS,
    TRAINER,
    Checkpoint,
    WorldLayout,
    damage,
    discard,
    files_of_rank,
    find_checkpoints,
    read_checkpoint,
    sync,
    write_manifest,
)
from .control import Control, RankError
from .reshard import check_movable, load_into
from .retention import disposable
from .shards import SavedEngine, names_for_reading

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

logger = logging.getLogger(__name__)


class SaveError(UserError):
    """A checkpoint could not be written; raised on every rank alike. Earlier ones are intact."""


@dataclass(frozen=True)
class _Pending:
    """A checkpoint that this rank writes."""

    step: int
    beside: Path
    final: Path
    written: Future[None]


class CheckpointStore:
    """The checkpoints of one run. Every method but ``writing`` and ``close`` is collective."""

    def __init__(self, folder: Path, control: Control, layout: WorldLayout, config: Config) -> None:
        from .writer import QueuedWriter  # imports DeepSpeed

        self.folder = folder
        self.control = control
        self.layout = layout
        self.config = config
        self.writer = QueuedWriter(config.checkpoint.background)
        self.seconds = 0.0
        """Time that training waited for saving, so far."""
        self._pending: _Pending | None = None

    @property
    def pending(self) -> int | None:
        """Step of the checkpoint that is not complete yet."""
        return None if self._pending is None else self._pending.step

    @property
    def writing(self) -> bool:
        """Whether this rank is still writing."""
        return self._pending is not None and not self._pending.written.done()

    def save(self, engine: DeepSpeedEngine, step: int, trainer_state: dict[str, Any]) -> None:
        """Begin the checkpoint of ``step``; ``finish`` completes it.

        With ``checkpoint.background`` the state is copied and training may go on at once.

        Raises:
            SaveError: nothing can be written there.
        """
        assert self._pending is None, "finish the last checkpoint first"
        started = time.perf_counter()
        final = self.folder / f"step-{step:06d}"
        beside = final.with_name(final.name + BESIDE)
        with self._failing_as_one(step, beside), self.control.together("preparing its folder"):
            if self.control.rank == 0:
                self._prepare(engine, beside, trainer_state)
        engine.checkpoint_engine = self.writer
        # DeepSpeed's own files (a script) go nowhere; its states go to the writer.
        with tempfile.TemporaryDirectory(prefix="anchorcontext-") as nowhere:
            names = names_for_reading(engine)
            engine.save_checkpoint(nowhere, tag=ENGINE_TAG, save_latest=False, client_state=names)
        self.writer.add(f"{RANKS}/{_rank_file(self.control.rank)}", random_states(engine.device))
        self._pending = _Pending(step, beside, final, self.writer.write(beside))
        self.seconds += time.perf_counter() - started

    def finish(self) -> Path:
        """Wait until every rank has written, and complete the checkpoint.

        Raises:
            SaveError: a rank could not write; what was written is removed.
        """
        pending = self._pending
        assert pending is not None, "nothing was begun"
        started = time.perf_counter()
        try:
            with self._failing_as_one(pending.step, pending.beside):
                with self.control.together("writing it"):
                    pending.written.result()
                with self.control.together("completing it"):
                    if self.control.rank == 0:
                        self._complete(pending)
        finally:
            self._pending = None
            self.seconds += time.perf_counter() - started
        return pending.final

    def latest(self) -> Checkpoint | None:
        """The intact checkpoint with the highest step; torn and damaged ones are named in the log.

        Rank 0 looks and tells the others, so that no two ranks resume from different ones; each
        rank reads its share of the files once, against their checksums.

        Raises:
            UserError: there were complete checkpoints, and every one of them is damaged.
        """
        paths: list[Path] = []
        with self.control.together(f"looking for checkpoints in {self.folder}"):
            if self.control.rank == 0:
                complete, torn = find_checkpoints(self.folder)
                for reason in torn:
                    logger.warning("ignoring an incomplete checkpoint: %s", reason)
                paths = [checkpoint.path for checkpoint in reversed(complete)]
                if not paths and any(not p.name.endswith(BESIDE) for p in self._folders()):
                    raise self._nothing_intact(torn[0])
        paths = self.control.from_first(paths)
        for path in paths:
            with self.control.together("reading the checkpoint"):
                found = read_checkpoint(path)
                mine = damage(files_of_rank(path, self.control.rank, self.control.world_size))
            damaged = [reason for reason in self.control.gather(mine) if reason]
            if not damaged:
                return found
            if self.control.rank == 0:
                logger.warning("ignoring a damaged checkpoint: %s", damaged[0])
        if paths:
            raise self._nothing_intact(damaged[0])
        return None

    def load(self, engine: DeepSpeedEngine, checkpoint: Checkpoint) -> dict[str, Any]:
        """Put engine, schedule and random number generators into the saved state.

        Bit for bit where ranks, sp and ZeRO stage are those that wrote it; under another layout
        the state is cut anew.

        Returns:
            The loop's own state, as given to ``save``.

        Raises:
            UserError: the state cannot be cut anew.
        """
        saved = checkpoint.layout
        with self.control.together("loading the checkpoint"):
            check_movable(saved, self.layout)
            state = checkpoint.trainer_state()
            # Ranks draw alike: a rank that was not there takes the generators of one that was.
            name = _rank_file(self.control.rank % saved.world_size)
            generators = torch.load(checkpoint.path / RANKS / name, weights_only=False)
        if saved == self.layout:
            loaded, _ = engine.load_checkpoint(str(checkpoint.path), tag=ENGINE_TAG)
            assert loaded is not None, f"DeepSpeed found no checkpoint in {checkpoint.path}"
        else:
            changes = ", ".join(saved.changes_to(self.layout))
            logger.info("%s is of another layout of ranks: %s", checkpoint.path, changes)
            load_into(engine, SavedEngine(checkpoint))
        restore_random_states(generators, engine.device)
        return state

    def close(self) -> None:
        """End the writer's thread."""
        self.writer.close()

    def _folders(self) -> list[Path]:
        return list(self.folder.glob("step-*"))

    def _nothing_intact(self, reason: str) -> UserError:
        """A run of a week must not start anew on its own."""
        return UserError(
            f"{self.folder}: every checkpoint is damaged ({reason}); restore one from a copy, or "
            "remove the folder to start anew"
        )

    def _prepare(
        self, engine: DeepSpeedEngine, beside: Path, trainer_state: dict[str, Any]
    ) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for torn in self.folder.glob(f"step-*{BESIDE}"):
            if torn != beside:
                _make_room(shutil.rmtree, torn)
        if beside.exists():
            shutil.rmtree(beside)
        for name in (ENGINE_TAG, RANKS):
            (beside / name).mkdir(parents=True)
        (beside / TRAINER).write_text(json.dumps(trainer_state, indent=2))
        save_config(self.config, beside / CONFIG)
        model: Any = engine.module.causal_lm
        model.config.save_pretrained(beside / HF)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(beside / HF)

    def _complete(self, pending: _Pending) -> None:
        """Manifest, rename, and only then the old ones."""
        values = {"step": pending.step, "layout": vars(self.layout), "versions": _versions()}
        write_manifest(pending.beside, values)
        if pending.final.exists():
            # A torn one of the same step: nothing complete is ever overwritten.
            discard(pending.final)
        pending.beside.rename(pending.final)
        sync(self.folder)
        # Later steps are those of damaged ones that the run went back from: not to be counted on.
        complete = {c.step: c for c in find_checkpoints(self.folder)[0] if c.step <= pending.step}
        for step in disposable(complete, self.config.train.steps, self.config.checkpoint):
            _make_room(discard, complete[step].path)

    @contextlib.contextmanager
    def _failing_as_one(self, step: int, beside: Path) -> Iterator[None]:
        """Turns what ``Control.together`` raises into a ``SaveError``, and clears the way."""
        try:
            yield
        except (OSError, RankError) as error:
            if self.control.rank == 0:
                # What is half written takes the room that the next attempt needs.
                shutil.rmtree(beside, ignore_errors=True)
            raise SaveError(
                f"run.output_dir: the checkpoint of step {step} was not written: {error}; make "
                "room there (checkpoint.keep, checkpoint.keep_every). Earlier ones are intact"
            ) from error


def _make_room(remove: Callable[[Path], None], path: Path) -> None:
    """What cannot be removed (a network file system keeps what somebody reads) is only left."""
    try:
        remove(path)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", path, error.strerror or error)


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def random_states(device: torch.device) -> dict[str, Any]:
    """Of every generator that a run on ``device`` draws from."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Go on drawing where ``states`` were taken."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:  # a CPU has saved none: the seed's stays
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
