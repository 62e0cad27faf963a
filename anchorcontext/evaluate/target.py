"""What is evaluated: a Hugging Face folder, a run or a checkpoint of ours, or several snapshots."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import Config, load_config
from ..data.tokenizer import load_tokenizer, resolve_anchor
from ..errors import UserError
from ..train.checkpoint_files import (
    CONFIG,
    HF,
    MANIFEST,
    find_checkpoint,
    find_checkpoints,
)
from ..weights import folder_digest, weights_digest
from ..words import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Target:
    """One set of weights, with its tokenizer; the weights are not read before they are needed."""

    name: str
    path: Path
    """A Hugging Face folder, or a checkpoint ``step-000100``."""
    hf: Path
    """Where ``config.json`` lies."""
    tokenizer_dir: Path
    bos: int | None = None
    """The token that training put in front of every window; None: whatever the tokenizer does."""

    @property
    def is_checkpoint(self) -> bool:
        return self.hf != self.path

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer; it puts :attr:`bos` in front by itself."""
        tokenizer = load_tokenizer(self.tokenizer_dir)
        if self.bos is not None:
            put_in_front(tokenizer, self.bos)
        return tokenizer

    def positions(self) -> int | None:
        """Tokens that the model's config allows, None where it names no limit."""
        values = json.loads((self.hf / "config.json").read_text())
        values = values.get("text_config", values)
        limit = values.get("max_position_embeddings") or values.get("n_positions")
        return int(limit) if limit else None

    def digest(self) -> str:
        """A fingerprint of the weights. (Of a checkpoint's files too: its manifest has no checksums
        of torch's archives.)"""
        if self.is_checkpoint:
            files = self.path.rglob("*.pt")
            return weights_digest(self.path, files, described=self.path / MANIFEST)
        return folder_digest(self.path)

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """A folder that stock transformers loads; a checkpoint is exported for as long."""
        if not self.is_checkpoint:
            yield self.path
            return
        from ..train.export import export_checkpoint

        holder = Path(tempfile.mkdtemp(prefix="anchorcontext-"))
        try:
            export_checkpoint(self.path, holder / "hf", tokenizer=self.tokenizer_dir)
            yield holder / "hf"
        finally:
            shutil.rmtree(holder, ignore_errors=True)


def find_targets(
    sources: Sequence[str | Path],
    *,
    snapshots: int = 1,
    apart: int | None = None,
    tokenizer: Path | None = None,
    bos: bool | None = None,
    at_least: int = 1,
) -> list[Target]:
    """Everything that ``sources`` mean, in order. A wrong folder is refused before tokenizers are
    loaded and torch is imported.

    Args:
        sources: Hugging Face folders, runs, their configs (YAML), checkpoints.
        snapshots: how many of a run's last checkpoints; more than 1 only for one run.
        apart: steps between them; default: whatever the run saved.
        tokenizer: a folder, in place of the model's own.
        bos: put BOS in front of every prompt. Default: as training did, for checkpoints; as the
            tokenizer does, for folders.
        at_least: so many are needed.

    Raises:
        UserError: nothing to evaluate there, or not as many snapshots.
    """
    if snapshots > 1 and len(sources) > 1:
        raise UserError("--snapshots: for one run; name the checkpoints themselves, or one run")
    paths = [
        path.resolve() for source in sources for path in _paths(Path(source), snapshots, apart)
    ]
    names = [_name(path) for path in paths]
    if len(paths) < at_least:
        raise UserError(
            f"{', '.join(names)}: at least {at_least} snapshots are needed; name more, or give "
            "--snapshots N"
        )
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise UserError(
            f"{', '.join(sorted(twice))}: named twice; every model counts once, and results are "
            "filed under the names of the folders"
        )
    return [_target(path, tokenizer, bos) for path in paths]


def put_in_front(tokenizer: PreTrainedTokenizerBase, token: int) -> None:
    """Make ``tokenizer`` begin every text with ``token``, once."""
    if tokenizer("a")["input_ids"][:1] == [token]:
        return
    from tokenizers.processors import Sequence as Chain
    from tokenizers.processors import TemplateProcessing

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(
            "this tokenizer is not a fast one, so BOS cannot be put in front; give a tokenizer "
            "folder with tokenizer.json, or --no-bos"
        )
    name = tokenizer.convert_ids_to_tokens(token)
    front = TemplateProcessing(single=f"{name} $A", special_tokens=[(name, token)])
    old = backend.post_processor
    backend.post_processor = front if old is None else Chain([old, front])


def _paths(source: Path, snapshots: int, apart: int | None) -> list[Path]:
    """The folders with weights that one argument means."""
    if source.suffix in (".yaml", ".yml") and source.is_file():
        run = load_config(source).run
        source = Path(run.output_dir) / run.name
    if not source.is_dir():
        raise UserError(
            f"{source}: no such folder; give a Hugging Face folder, a run, a checkpoint or a "
            "run's config"
        )
    if snapshots == 1:
        if not (source / "config.json").is_file() or (source / MANIFEST).is_file():
            return [find_checkpoint(source)]
        if not any(source.glob("*.safetensors")) and not any(source.glob("*.bin")):
            raise UserError(f"{source}: has a config.json but no weights (*.safetensors)")
        return [source]
    folder = source / "checkpoints" if (source / "checkpoints").is_dir() else source
    complete, _ = find_checkpoints(folder)
    by_step = {checkpoint.step: checkpoint.path for checkpoint in complete}
    steps = sorted(by_step)
    if apart is not None and steps:
        wanted = [steps[-1] - apart * back for back in reversed(range(snapshots))]
    else:
        wanted = steps[-snapshots:]
    missing = [step for step in wanted if step not in by_step]
    if missing or len(wanted) < snapshots:
        raise UserError(
            f"--snapshots {snapshots}{f' --apart {apart}' if apart else ''}: {folder} has "
            f"{counted(len(steps), 'complete checkpoint')} (steps: {steps}); train with "
            f"checkpoint.every = {apart or 10} and checkpoint.keep >= {snapshots}, or ask for fewer"
        )
    return [by_step[step] for step in wanted]


def _target(path: Path, tokenizer: Path | None, bos: bool | None) -> Target:
    if (path / MANIFEST).is_file():
        config = load_config(path / CONFIG)
        folder = tokenizer or _trained_with(config)
        token = resolve_anchor(load_tokenizer(folder), config.data.anchor)
        return Target(_name(path), path, path / HF, folder, None if bos is False else token)
    folder = tokenizer or path
    front = resolve_anchor(load_tokenizer(folder), "auto") if bos else None
    return Target(_name(path), path, path, folder, front)


def _name(path: Path) -> str:
    """What a folder's results are filed under: ``RUN-step-000100``, ``RUN-hf``, or its name."""
    if (path / MANIFEST).is_file():
        run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
        return f"{run.name}-{path.name}"
    return f"{path.parent.name}-hf" if path.name == "hf" else path.name  # a run's export


def _trained_with(config: Config) -> Path:
    from ..train.export import prepared_tokenizer

    folder = prepared_tokenizer(config)
    if folder is None:
        raise UserError(
            f"the tokenizer of run {config.run.name!r} is gone ({config.data.path}); give "
            "--tokenizer FOLDER"
        )
    return folder
