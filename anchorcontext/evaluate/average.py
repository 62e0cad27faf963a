"""The mean of snapshots' weights, as a Hugging Face folder.

It is a model of its own: the paper's score is the mean of five checkpoints' scores
(:mod:`anchorcontext.evaluate.scores`), not the score of their mean.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..config import load_config
from ..errors import UserError
from ..model.export import FILE_BYTES, ExportReport, export_one_by_one
from ..model.load import DTYPES
from ..train.checkpoint_files import CONFIG
from ..train.consolidate import consolidated_weights
from ..train.export import exported_config
from ..words import counted

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from .target import Target

VOLATILE = ("transformers_version", "_name_or_path", "architectures")
"""Keys of a model's config that say nothing about its weights."""


@dataclass(frozen=True)
class AverageReport:
    """What was averaged, and what was written."""

    snapshots: list[str]
    export: ExportReport


def average_weights(
    targets: Sequence[Target],
    out: Path,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    file_bytes: int = FILE_BYTES,
) -> AverageReport:
    """Write the mean of the weights as a folder that stock transformers loads.

    Sums are fp32; of checkpoints the fp32 master weights are averaged. One tensor is held at a
    time, sums lie in a file beside ``out``, and the result is written a file at a time.

    Args:
        targets: two snapshots or more: checkpoints, Hugging Face folders, or both.
        out: the folder to make; config and tokenizer are the first snapshot's.
        dtype: ``fp32`` or ``bf16``; default the first snapshot's.
        overwrite: replace an existing folder.
        file_bytes: of a file of the result, at most.

    Raises:
        UserError: configs, tensors, shapes or dtypes of the snapshots differ (the message names
            them); ``out`` exists.
    """
    assert len(targets) > 1, "one snapshot has no mean"
    _check_configs(targets)
    config, kind = _result(targets[0])
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix=f".{out.name}.", suffix=".sum", dir=out.parent) as file:
        sums = _Sums(Path(file.name), targets[0])
        for target in targets[1:]:
            sums.add(target)
        report = export_one_by_one(
            {name: torch.Size(shape) for name, (_, shape) in sums.places.items()},
            lambda name: sums.read(name) / len(targets),
            config,
            out,
            dtype=DTYPES[dtype] if dtype is not None else kind,
            tokenizer_dir=targets[0].tokenizer_dir if _has_tokenizer(targets[0]) else None,
            overwrite=overwrite,
            file_bytes=file_bytes,
        )
    return AverageReport([target.name for target in targets], report)


class _Sums:
    """fp32 sums of all tensors in one file, the first snapshot's to begin with."""

    def __init__(self, path: Path, first: Target) -> None:
        self._path, self._first = path, first
        self.places: dict[str, tuple[int, tuple[int, ...]]] = {}
        """Name -> first element and shape."""
        self._dtypes: dict[str, torch.dtype] = {}
        end = 0
        with path.open("wb") as file:
            for name, tensor in _tensors(first):
                self.places[name] = (end, tuple(tensor.shape))
                self._dtypes[name] = tensor.dtype
                tensor.float().contiguous().numpy().tofile(file)
                end += tensor.numel()

    def add(self, target: Target) -> None:
        seen = set()
        sums = np.memmap(self._path, np.float32, mode="r+")
        for name, tensor in _tensors(target):
            self._check(target, name, tensor)
            start, _ = self.places[name]
            sums[start : start + tensor.numel()] += tensor.float().flatten().numpy()
            seen.add(name)
        missing = sorted(self.places.keys() - seen)
        if missing:
            raise UserError(
                f"{target.name} lacks {missing[0]} of {self._first.name} "
                f"({counted(len(missing), 'tensor')} in all): snapshots of one model have the "
                "same tensors; leave it out"
            )

    def read(self, name: str) -> torch.Tensor:
        start, shape = self.places[name]
        count = int(np.prod(shape, dtype=np.int64))
        values = np.fromfile(self._path, np.float32, count, offset=4 * start)
        return torch.from_numpy(values).view(shape)

    def _check(self, target: Target, name: str, tensor: torch.Tensor) -> None:
        if name not in self.places:
            raise UserError(
                f"{target.name} has {name}, which {self._first.name} lacks: snapshots of one model "
                "have the same tensors; leave it out"
            )
        for what, mine, theirs in (
            ("shape", tuple(tensor.shape), self.places[name][1]),
            ("dtype", tensor.dtype, self._dtypes[name]),
        ):
            if mine != theirs:
                raise UserError(
                    f"{name} has {what} {mine} in {target.name}, {theirs} in {self._first.name}: "
                    "average snapshots of one run, in one dtype"
                )


def _tensors(target: Target) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a snapshot once, by its Hugging Face name."""
    if target.is_checkpoint:
        yield from consolidated_weights(target.path)
        return
    from safetensors import safe_open

    files = sorted(target.path.glob("*.safetensors"))
    if not files:
        raise UserError(f"{target.path}: has no *.safetensors, the only weights that are averaged")
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (a safetensors handle is no mapping)
                yield name, file.get_tensor(name)


def _check_configs(targets: Sequence[Target]) -> None:
    configs = [json.loads((target.hf / "config.json").read_text()) for target in targets]
    first = configs[0]
    for target, config in zip(targets[1:], configs[1:], strict=True):
        for key in sorted(first.keys() | config.keys()):
            if key not in VOLATILE and config.get(key) != first.get(key):
                raise UserError(
                    f"{target.name} has {key} = {config.get(key)!r} in its config.json, "
                    f"{targets[0].name} {first.get(key)!r}: average snapshots of one model"
                )


def _result(target: Target) -> tuple[PreTrainedConfig, torch.dtype]:
    """The config that is written, and the dtype of the snapshot's weights."""
    from transformers import AutoConfig

    if target.is_checkpoint:
        run = load_config(target.path / CONFIG)
        return exported_config(target.path, run, target.tokenizer_dir), DTYPES[run.model.dtype]
    dtype = next(tensor.dtype for _, tensor in _tensors(target))
    return AutoConfig.from_pretrained(target.path), dtype


def _has_tokenizer(target: Target) -> bool:
    return (target.tokenizer_dir / "tokenizer_config.json").is_file()
