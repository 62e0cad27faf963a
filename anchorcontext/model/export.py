"""A plain Hugging Face folder that stock transformers loads: safetensors, config, tokenizer."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from ..errors import UserError
from ..words import counted
from .quiet import quiet_progress

log = logging.getLogger(__name__)

MAX_SHARD_SIZE = "5GB"
FILE_BYTES = 5 * 10**9
TOKENIZER_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
)
SAFETENSORS_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class ExportReport:
    """What was written."""

    path: Path
    num_tensors: int
    num_parameters: int
    num_bytes: int
    dtype: str
    tied: bool
    tokenizer: bool


def export_model(
    state_dict: Mapping[str, torch.Tensor],
    config: PreTrainedConfig,
    out_dir: str | Path,
    *,
    dtype: torch.dtype | None = None,
    tokenizer_dir: str | Path | None = None,
    overwrite: bool = False,
) -> ExportReport:
    """Write ``state_dict`` as a Hugging Face folder, all of it or nothing.

    The folder is written beside ``out_dir``, read back, and only then renamed.

    Args:
        state_dict: the model's parameters by their Hugging Face names, whole, any dtype. A tied
            head may be there or not; it must then equal the embedding.
        config: the live model's config: RoPE and ``max_position_embeddings`` are saved from it.
        out_dir: the folder to make.
        dtype: of the written weights; default the config's, else that of the state dict.
        tokenizer_dir: folder whose tokenizer files are copied.
        overwrite: replace an existing folder.

    Raises:
        UserError: tensors missing, left over, empty or of another shape; the folder exists.
    """
    out = Path(out_dir)
    dtype = dtype or _dtype_of(config, state_dict)
    with _beside(out, overwrite) as folder:
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config, dtype=dtype)
        state = _complete(dict(state_dict), skeleton, config)
        _keep_generation_config(skeleton, tokenizer_dir)
        cast = {name: tensor.detach().to(dtype).contiguous() for name, tensor in state.items()}
        with quiet_progress():
            skeleton.save_pretrained(folder, state_dict=cast, max_shard_size=MAX_SHARD_SIZE)
        copied = _copy_tokenizer(tokenizer_dir, folder) if tokenizer_dir is not None else 0
        return _read_back(folder, skeleton, state, dtype, out, copied > 0)


def export_one_by_one(
    shapes: Mapping[str, torch.Size],
    read: Callable[[str], torch.Tensor],
    config: PreTrainedConfig,
    out_dir: str | Path,
    *,
    dtype: torch.dtype,
    tokenizer_dir: str | Path | None = None,
    overwrite: bool = False,
    file_bytes: int = FILE_BYTES,
) -> ExportReport:
    """As :func:`export_model`, for weights that are read one at a time: it holds those of one file.

    Args:
        shapes: of all tensors, by name; of tied ones either or both.
        read: a tensor by its name, any dtype.
        file_bytes: a file is closed before it exceeds so many, unless one tensor does.
    """
    out = Path(out_dir)
    with _beside(out, overwrite) as folder:
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config, dtype=dtype)
            state = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
        tied = dict(getattr(skeleton, "all_tied_weights_keys", None) or {})
        state |= {name: state[source] for name, source in tied.items() if source in state}
        names = [name for name in _matching(state, skeleton, config) if name not in tied]
        _keep_generation_config(skeleton, tokenizer_dir)
        skeleton.config.architectures = [type(skeleton).__name__]
        skeleton.config.save_pretrained(folder)
        if skeleton.can_generate():
            skeleton.generation_config.save_pretrained(folder)
        _write_files(folder, {name: state[name].nbytes for name in names}, read, dtype, file_bytes)
        copied = _copy_tokenizer(tokenizer_dir, folder) if tokenizer_dir is not None else 0
        return _read_back(folder, skeleton, state, dtype, out, copied > 0)


def _write_files(
    folder: Path,
    sizes: Mapping[str, int],
    read: Callable[[str], torch.Tensor],
    dtype: torch.dtype,
    file_bytes: int,
) -> None:
    """Safetensors files and, where there are several, their index, named as transformers does."""
    files: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if files[-1] and filled + size > file_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    places: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        part = f"-{number:05d}-of-{len(files):05d}" if len(files) > 1 else ""
        file = f"model{part}.safetensors"
        weights = {name: read(name).detach().to(dtype).contiguous() for name in names}
        save_file(weights, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(names, file)
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        text = json.dumps(index, indent=2) + "\n"
        (folder / "model.safetensors.index.json").write_text(text)


@contextmanager
def _beside(out: Path, overwrite: bool) -> Iterator[Path]:
    """A folder that becomes ``out`` when the block succeeds, and is gone when it fails."""
    if out.exists() and not overwrite:
        raise UserError(
            f"{out} exists: choose another folder, or allow it to be replaced (--overwrite)"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".part", dir=out.parent))
    try:
        yield beside
        _open_permissions(beside)
        _swap(beside, out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _complete(
    state: dict[str, torch.Tensor], skeleton: PreTrainedModel, config: PreTrainedConfig
) -> dict[str, torch.Tensor]:
    """The state dict with exactly the skeleton's names; tied names point to one tensor."""
    tied: dict[str, str] = dict(getattr(skeleton, "all_tied_weights_keys", None) or {})
    for name, source in tied.items():
        if source not in state:
            continue
        if name in state and not torch.equal(state[name].cpu(), state[source].cpu()):
            raise UserError(
                f"{name} and {source} are tied in the config but differ in the checkpoint: set "
                "tie_word_embeddings to what the model was trained with"
            )
        state[name] = state[source]
    return _matching(state, skeleton, config)


def _matching(
    state: dict[str, torch.Tensor], skeleton: PreTrainedModel, config: PreTrainedConfig
) -> dict[str, torch.Tensor]:
    """The state dict, after its names and shapes were compared with the skeleton's."""
    expected = {name: tensor.shape for name, tensor in skeleton.state_dict().items()}
    missing, extra = sorted(set(expected) - set(state)), sorted(set(state) - set(expected))
    if missing or extra:
        raise UserError(
            f"the checkpoint does not fit a {config.model_type} model of this config: missing "
            f"{missing[:5] or 'none'}, left over {extra[:5] or 'none'} "
            f"({len(missing)} and {counted(len(extra), 'tensor')})"
        )
    for name, shape in expected.items():
        if state[name].shape != shape:
            raise UserError(
                f"{name} has shape {tuple(state[name].shape)} in the checkpoint, "
                f"{tuple(shape)} in the model: the weights were not gathered from all ranks"
            )
    return state


def _dtype_of(config: PreTrainedConfig, state: Mapping[str, torch.Tensor]) -> torch.dtype:
    dtype = getattr(config, "dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    return dtype or next(iter(state.values())).dtype


def _keep_generation_config(skeleton: PreTrainedModel, source: str | Path | None) -> None:
    if source is not None and (Path(source) / "generation_config.json").is_file():
        skeleton.generation_config = GenerationConfig.from_pretrained(source)


def _copy_tokenizer(source: str | Path, out: Path) -> int:
    files = {path for pattern in TOKENIZER_PATTERNS for path in Path(source).glob(pattern)}
    for path in files:
        if path.is_file():
            shutil.copy2(path, out / path.name)
    if not files:
        raise UserError(f"{source} holds no tokenizer files: give the folder of the tokenizer")
    return len(files)


def _read_back(
    folder: Path,
    skeleton: PreTrainedModel,
    state: dict[str, torch.Tensor],
    dtype: torch.dtype,
    out: Path,
    has_tokenizer: bool,
) -> ExportReport:
    """Check what lies on disk: every tensor, its shape and dtype; the config, RoPE in it."""
    tied = set(getattr(skeleton, "all_tied_weights_keys", None) or {})
    written: dict[str, tuple[tuple[int, ...], str]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (a safetensors handle is no mapping)
                part = file.get_slice(name)
                written[name] = (tuple(part.get_shape()), part.get_dtype())
    wanted = {
        name: (tuple(tensor.shape), SAFETENSORS_DTYPES[dtype])
        for name, tensor in state.items()
        if name not in tied
    }
    lost = [name for name in wanted if written.get(name) != wanted[name]]
    added = sorted(set(written) - set(state))
    again = AutoConfig.from_pretrained(folder)
    saved, live = again.to_dict(), skeleton.config.to_dict()
    differing = {key for key in saved.keys() | live.keys() if saved.get(key) != live.get(key)}
    differing -= {"transformers_version", "architectures", "_name_or_path"}
    if lost or added or differing:
        raise RuntimeError(
            f"what lies on disk is not what was exported: tensors lost or changed {lost[:5]}, "
            f"added {added[:5]}, config keys {sorted(differing)}"
        )
    return ExportReport(
        path=out,
        num_tensors=len(wanted),
        num_parameters=sum(state[name].numel() for name in wanted),
        num_bytes=sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        dtype=json.loads((folder / "config.json").read_text())["dtype"],
        tied=bool(tied),
        tokenizer=has_tokenizer,
    )


def _open_permissions(folder: Path) -> None:
    """The usual permissions: mkdtemp and safetensors make what they write private."""
    mode = (folder / "config.json").stat().st_mode & 0o777
    for file in folder.iterdir():
        file.chmod(mode)
    folder.chmod(mode | (mode & 0o444) >> 2)


def _swap(beside: Path, out: Path) -> None:
    """Rename ``beside`` to ``out``; an older ``out`` moves away first and back if that fails."""
    if not out.exists():
        beside.rename(out)
        return
    old = beside.with_name(f"{beside.name}.old")
    out.rename(old)
    try:
        beside.rename(out)
    except OSError:
        old.rename(out)
        raise
    shutil.rmtree(old)
