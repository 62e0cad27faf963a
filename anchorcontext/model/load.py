"""Build the model to train: from a folder or from scratch; RoPE set before, checked after."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..errors import UserError
from ..hub import offline_without_hub
from .attention import enable
from .compile import compile_layers
from .memory import save_memory
from .precision import set_precision
from .quiet import quiet_progress
from .rope import (
    cast_parameters,
    check_theta_sources,
    configure_rope,
    restore_rotary_buffers,
    verify_rope,
)
from .rotation_check import check_rotation
from .supported import check_supported, output_head, probe_model

if TYPE_CHECKING:
    from ..config.sections import ModelSection, PrecisionSection

log = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def build_model(
    section: ModelSection,
    *,
    window_tokens: int,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    vocab_size: int | None = None,
    precision: PrecisionSection | None = None,
    probe: bool = True,
    skeleton: bool = False,
) -> PreTrainedModel:
    """The enabled, checked model of a config's ``model:`` section, on the CPU.

    Args:
        section: see :class:`anchorcontext.config.ModelSection`.
        window_tokens: positions of the longest window; the model must reach that far.
        seed: of the initial weights, for a model from scratch.
        dtype: of the weights; default the section's.
        vocab_size: entries of the tokenizer; sets the vocabulary of a model from scratch and must
            fit into that of a pretrained one.
        precision: where attention rounds to ``dtype`` (:mod:`.precision`); default: as stock does.
        probe: also run two tiny windows through the model (:func:`probe_model`). Leave it out when
            weights are partitioned or on no device.
        skeleton: parameters on the meta device, without weights and memory, and no probe; buffers
            are real.

    Raises:
        UserError: see :func:`build_config`; weights missing from the checkpoint or left over; a
            model whose attention or head would not be reproduced exactly.
    """
    config = build_config(section, window_tokens=window_tokens, vocab_size=vocab_size)
    dtype = dtype or DTYPES[section.dtype]
    if skeleton:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        restore_rotary_buffers(model)
    elif section.path is not None:
        model = _load(section.path, config, dtype)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            # Drawn in fp32 whatever the dtype, so that one seed is one model.
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        cast_parameters(model, dtype)
        model.config.dtype = dtype
    verify_rope(model, config)
    enable(model)
    if precision is not None:
        set_precision(model, precision)
    output_head(model)
    if probe and not skeleton:
        probe_model(model)
        if precision is not None and precision.engine_rotates:
            check_rotation(model)
    save_memory(model, section)
    if section.compile:
        compile_layers(model)
    return model


def build_config(
    section: ModelSection, *, window_tokens: int, vocab_size: int | None = None
) -> PreTrainedConfig:
    """The Hugging Face config of a ``model:`` section, with RoPE set; loads no weight.

    Raises:
        UserError: no such folder or model type; a RoPE setting that is missing, contradictory or
            without effect; a feature we would lose; windows longer than the model reaches.
    """
    config = _read(section.path) if section.path is not None else _fresh(section, vocab_size)
    if section.path is not None:
        raw, _ = PreTrainedConfig.get_config_dict(section.path)
        check_theta_sources(raw, section.rope.theta, f"{section.path}/config.json")
        _check_vocabulary(config, vocab_size, section.path)
    check_supported(config, window_tokens)
    configure_rope(
        config,
        theta=section.rope.theta,
        rope_type=section.rope.type,
        factor=section.rope.factor,
        original_max_position_embeddings=section.rope.original_max_position_embeddings,
        extra=dict(section.rope.extra),
        max_position_embeddings=_context_length(config, section, window_tokens),
    )
    return config


def _read(path: str) -> PreTrainedConfig:
    if not (Path(path) / "config.json").is_file() and Path(path).exists():
        raise UserError(
            f"model.path = {path}: the folder has no config.json; give a Hugging Face model folder "
            "(`anchorcontext import-gguf` makes one from a GGUF file)"
        )
    if not Path(path).exists() and path.startswith(("/", ".", "~")):
        raise UserError(
            f"model.path = {path}: there is no such folder; give one that holds config.json and "
            "safetensors, or a hub name"
        )
    offline_without_hub(path)
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise UserError(
            f"model.path = {path}: no model config could be read there ({error}); give a folder "
            "that holds config.json and safetensors"
        ) from error


def _fresh(section: ModelSection, vocab_size: int | None) -> PreTrainedConfig:
    # A deep copy: transformers fills in the dictionaries it is given.
    keys = copy.deepcopy(dict(section.scratch or {}))
    model_type = keys.pop("model_type", None)
    if model_type is None:
        raise UserError("model.scratch has no model_type; set it, to llama for instance")
    if vocab_size is not None:
        keys.setdefault("vocab_size", vocab_size)
        if keys["vocab_size"] < vocab_size:
            raise UserError(
                f"model.scratch.vocab_size = {keys['vocab_size']} for a tokenizer of {vocab_size} "
                "entries: leave it out, or give at least that many"
            )
    try:
        config = AutoConfig.for_model(model_type, **keys)
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"model.scratch: transformers refuses it ({reason}); mend these keys"
        ) from error
    unknown = sorted(set(keys) - set(type(config)().to_dict()) - {"rope_theta", "rope_scaling"})
    if unknown:
        raise UserError(
            f"model.scratch has keys that a {model_type} config does not know: "
            f"{', '.join(unknown)}; remove or correct them"
        )
    text = config.get_text_config()
    padding = getattr(text, "pad_token_id", None)
    if padding is not None and not -text.vocab_size <= padding < text.vocab_size:
        raise UserError(
            f"model.scratch.pad_token_id = {padding} for a vocabulary of {text.vocab_size} (it may "
            f"be the default of {model_type}): set it to null, or to one of the ids"
        )
    return config


def _context_length(
    config: PreTrainedConfig, section: ModelSection, window_tokens: int
) -> int | None:
    """``max_position_embeddings`` to set; None: what the config says already."""
    own = getattr(config.get_text_config(), "max_position_embeddings", None)
    wanted = section.max_position_embeddings
    if wanted is not None:
        if wanted < window_tokens:
            raise UserError(
                f"model.max_position_embeddings = {wanted} for windows of {window_tokens} tokens: "
                f"set it to at least {window_tokens}"
            )
        return wanted
    if own is None or window_tokens <= own:
        return None
    rope = section.rope
    if section.path is not None and rope.theta is None and rope.type is None:
        raise UserError(
            f"data.window_tokens = {window_tokens}, but {section.path} reaches {own} tokens "
            "(max_position_embeddings) and its RoPE is left as it is; set model.rope.theta (5e6 "
            f"for 64K, 1e7 for 128K) or model.rope.type, or model.max_position_embeddings: "
            f"{window_tokens} to train at these positions all the same"
        )
    return window_tokens


def _check_vocabulary(config: PreTrainedConfig, vocab_size: int | None, path: str) -> None:
    own = config.get_text_config().vocab_size
    if vocab_size is not None and vocab_size > own:
        raise UserError(
            f"the tokenizer has {vocab_size} entries, the model at {path} embeds {own}; use the "
            "model's own tokenizer"
        )


def _load(path: str, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    try:
        with quiet_progress():
            model, report = AutoModelForCausalLM.from_pretrained(
                path, config=config, dtype=dtype, output_loading_info=True
            )
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"model.path = {path}: the weights cannot be loaded ({error})") from error
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        problems = _names(report.get(what))
        if problems:
            raise UserError(
                f"model.path = {path}: {what.replace('_', ' ')} in the weights: "
                f"{', '.join(problems[:5])}{' ...' if len(problems) > 5 else ''} "
                f"({len(problems)} in all); the folder does not hold the weights of "
                f"{type(model).__name__} with this config"
            )
    return model


def _names(problems: Any) -> list[str]:
    return sorted(str(problem) for problem in problems or ())
