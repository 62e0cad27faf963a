"""Writing a checkpoint's files, at once or in a thread while training goes on.

DeepSpeed hands its state to a checkpoint engine, its interface for storage. Ours only takes the
state; the files are written after DeepSpeed's own barriers, so that a full disk on one rank is an
error that all ranks hear of, and not a rank missing at a barrier.
"""

from __future__ import annotations

import copy
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import (
    CheckpointCommitInfo,
    CheckpointEngine,
)

from .checkpoint_files import ENGINE_TAG, sync


class QueuedWriter(CheckpointEngine):
    """Collects states by the name of their file until ``write`` puts them into a folder.

    Args:
        background: write in a thread, from copies in the host's memory.
    """

    def __init__(self, background: bool = False) -> None:
        super().__init__()
        self.background = background
        self._queued: dict[str, Any] = {}
        self._thread = ThreadPoolExecutor(1, "checkpoint") if background else None

    def save(self, state_dict: Any, path: str) -> None:
        """DeepSpeed's call: queue a state for the engine's folder."""
        self.add(f"{ENGINE_TAG}/{Path(path).name}", state_dict)

    def add(self, name: str, state: Any) -> None:
        """Queue a state under a relative path; a copy of it when the writing comes later."""
        self._queued[name] = snapshot(state) if self.background else state

    def write(self, folder: Path) -> Future[None]:
        """Write what is queued into ``folder``, synced; the future holds the error, if any."""
        states, self._queued = self._queued, {}
        if self._thread is not None:
            return self._thread.submit(write_states, states, folder)
        done: Future[None] = Future()
        try:
            write_states(states, folder)
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        return done

    def load(self, path: str, map_location: Any = None) -> Any:
        """One file's state."""
        return torch.load(path, map_location=map_location, weights_only=False)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing: the folders are there before DeepSpeed is asked to save."""

    def create(self, info: CheckpointCommitInfo) -> None:
        """Forget what an attempt that failed left behind."""
        self._queued = {}

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Nothing: a checkpoint is committed when all ranks have written."""
        return True

    def close(self) -> None:
        """Wait for what is being written, and end the thread."""
        if self._thread is not None:
            self._thread.shutdown()


def write_states(states: dict[str, Any], folder: Path) -> None:
    """Write each state to its file and put it onto the disk.

    Raises:
        OSError: the disk is full, or refuses for another reason.
    """
    for name, state in states.items():
        path = folder / name
        try:
            torch.save(state, path)
            sync(path)
        except (OSError, RuntimeError) as error:  # torch's C++ writer raises the latter
            free = shutil.disk_usage(folder).free / 2**20 if folder.is_dir() else 0
            reason = str(error).splitlines()[0]
            raise OSError(f"{path}: {reason} ({free:,.0f} MiB are free there)") from error


def snapshot(state: Any) -> Any:
    """A copy of ``state`` whose tensors lie in the host's memory; shared storages stay shared."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return tensor_copy(value)
        if isinstance(value, dict):
            same = copy.copy(value)
            same.update({key: copied(item) for key, item in value.items()})
            return same
        if isinstance(value, list):
            return [copied(item) for item in value]
        if type(value) is tuple:
            return tuple(copied(item) for item in value)
        return value

    def tensor_copy(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in storages:
            storages[key] = storage.clone() if storage.device.type == "cpu" else storage.cpu()
        place = (tensor.storage_offset(), tensor.shape, tensor.stride())
        return torch.empty(0, dtype=tensor.dtype).set_(storages[key], *place)

    return copied(state)
