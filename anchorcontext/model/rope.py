"""RoPE through the config: set before the model is built, checked against its live tables after.

transformers keeps RoPE in ``config.rope_parameters`` and computes ``inv_freq`` once, when the model
is built; a config edited later changes nothing. So :func:`configure_rope` edits the config first,
and :func:`verify_rope` recomputes every table from the config in fp64, by formulas of its own, and
compares.

``inv_freq`` must stay fp32: in bf16 the angle of position 100,000 is off by hundreds of radians.
``model.to(torch.bfloat16)`` rounds it, ``from_pretrained(dtype=...)`` and DeepSpeed do not;
:func:`fix_rotary_buffers` brings it back, bit for bit as transformers computes it.
"""

from __future__ import annotations

import json
import logging
import math
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig

from ..errors import UserError

log = logging.getLogger(__name__)

# transformers computes theta ** (2i/d) in fp32; where 2i/d is no dyadic fraction (head dimension 80
# or 96) its rounding alone moves inv_freq by up to 5e-7 relative; bf16 rounding moves it by 4e-3.
RELATIVE_TOLERANCE = 1e-6
ABSOLUTE_TOLERANCE = 1e-7

NEEDS_FACTOR = ("linear", "yarn", "llama3")
NEEDS_ORIGINAL = ("yarn", "llama3")
# The values Llama 3.1 was trained with.
LLAMA3_DEFAULTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def configure_rope(
    config: PreTrainedConfig,
    *,
    theta: float | None = None,
    rope_type: str | None = None,
    factor: float | None = None,
    original_max_position_embeddings: int | None = None,
    extra: dict[str, Any] | None = None,
    max_position_embeddings: int | None = None,
) -> None:
    """Set RoPE in ``config``, before a model is built from it; None keeps what the config says.

    A new ``rope_type`` replaces the old type's parameters, except the base and the rotated part of
    the head. ``original_max_position_embeddings`` defaults to the context length the config had
    before ``max_position_embeddings`` is applied.

    Raises:
        UserError: a factor missing, out of place or without effect, an unknown type.
    """
    text = config.get_text_config()
    old = _parameters(text)
    before = getattr(text, "max_position_embeddings", None)
    kind = rope_type or old["rope_type"]
    if kind == old["rope_type"]:
        new = {key: value for key, value in old.items() if key != "type"}
    else:
        kept = ("rope_theta", "partial_rotary_factor")
        new = {key: old[key] for key in kept if old.get(key) is not None}
        if kind in NEEDS_ORIGINAL and before is not None:
            new["original_max_position_embeddings"] = before
        if kind == "llama3":
            new |= LLAMA3_DEFAULTS
    new["rope_type"] = kind
    if theta is not None:
        new["rope_theta"] = float(theta)
    if factor is not None:
        new["factor"] = float(factor)
    if original_max_position_embeddings is not None:
        new["original_max_position_embeddings"] = original_max_position_embeddings
    new |= extra or {}
    _check_parameters(text, new, factor, rope_type, max_position_embeddings)
    if max_position_embeddings is not None:
        text.max_position_embeddings = max_position_embeddings
    text.rope_parameters = new
    # Left beside rope_parameters, these would contradict it in the saved config.
    for stale in ("rope_theta", "rope_scaling", "original_max_position_embeddings"):
        text.__dict__.pop(stale, None)
    again = type(text).from_dict(json.loads(text.to_json_string(use_diff=False)))
    if _parameters(again) != _parameters(text):
        raise UserError(
            f"RoPE {_parameters(text)} would be read back as {_parameters(again)} by transformers; "
            "remove the parameters that differ"
        )


def check_theta_sources(raw: dict[str, Any], theta: float | None, where: str) -> None:
    """Refuse a config.json whose RoPE base depends on who reads it.

    Old configs keep the base in ``rope_theta``, new ones in ``rope_parameters``; in a mixed one
    transformers may take another than the one written, or its default.

    Args:
        raw: the parsed config.json.
        theta: the base the user asks for; it settles every conflict.
        where: the file, for the message.

    Raises:
        UserError: the sources differ, or the one base given would be ignored.
    """
    if theta is not None:
        return
    given: dict[str, Any] = {"rope_theta": raw.get("rope_theta")}
    for section in ("rope_parameters", "rope_scaling"):
        given[f"{section}.rope_theta"] = (raw.get(section) or {}).get("rope_theta")
    given = {key: value for key, value in given.items() if value is not None}
    if len({float(value) for value in given.values()}) > 1:
        raise UserError(
            f"{where} gives several RoPE bases ({_listed(given)}); say which is meant with "
            "model.rope.theta"
        )
    lost = "rope_parameters.rope_theta" in given and raw.get("rope_scaling") and len(given) == 1
    if lost:
        raise UserError(
            f"{where} has both rope_scaling and rope_parameters: transformers reads rope_scaling "
            f"and would lose the base {given['rope_parameters.rope_theta']}; say which is meant "
            "with model.rope.theta"
        )


def expected_inv_freq(config: PreTrainedConfig) -> tuple[np.ndarray, float]:
    """The inverse frequencies and the factor on cos and sin that ``config`` describes, in fp64.

    Formulas: RoFormer (arXiv 2104.09864) for ``default``; position interpolation (arXiv
    2306.15595) for ``linear``; YaRN (arXiv 2309.00071, section 3) for ``yarn``; the frequency
    bands of Llama 3.1 for ``llama3``. ``dynamic`` equals ``default`` up to its original length.

    Returns:
        (rotated dimensions / 2,) radians per position, and the factor.

    Raises:
        UserError: a type this function does not know.
    """
    text = config.get_text_config()
    rope = _parameters(text)
    kind, theta = rope["rope_type"], float(rope["rope_theta"])
    head_dim = head_size(text)
    dim = int(head_dim * (rope.get("partial_rotary_factor") or 1.0))
    exponent = np.arange(0, dim, 2, dtype=np.float64) / dim
    inv_freq = theta**-exponent
    if kind in ("default", "dynamic"):
        return inv_freq, 1.0
    if kind == "linear":
        return inv_freq / rope["factor"], 1.0
    if kind == "llama3":
        return _llama3(inv_freq, rope), 1.0
    if kind == "yarn":
        return _yarn(inv_freq, theta, dim, rope), _yarn_attention_factor(rope)
    raise UserError(_unknown(kind))


def verify_rope(model: nn.Module, config: PreTrainedConfig | None = None) -> None:
    """Compare every rotary table of ``model`` with what its config describes.

    Raises:
        UserError: no table, a table that is not fp32, or one that differs by more than 1e-6
            relative or 1e-7 absolute.
    """
    modules = rotary_modules(model)
    if not modules:
        raise UserError(
            f"{type(model).__name__} has no rotary embedding (no inv_freq): positions must come "
            "from RoPE; train another model"
        )
    for name, module in modules.items():
        described = config if config is not None else module.config
        expected, factor = expected_inv_freq(described)
        live = module.inv_freq
        if live.dtype != torch.float32:
            raise UserError(
                f"{name}.inv_freq is {live.dtype}: a cast of the model rounded it; cast with "
                "anchorcontext.model.cast_parameters, or call fix_rotary_buffers(model) after"
            )
        table = live.detach().double().cpu().numpy()
        scaling = float(getattr(module, "attention_scaling", 1.0))
        if table.shape != expected.shape:
            raise UserError(
                f"{name}.inv_freq has {table.size} frequencies, the config describes "
                f"{expected.size}: the model reads RoPE from elsewhere"
            )
        error = np.abs(table - expected)
        worst = int(np.argmax(error / expected))
        if (error > ABSOLUTE_TOLERANCE).any() or (error > RELATIVE_TOLERANCE * expected).any():
            raise UserError(
                f"{name}.inv_freq[{worst}] is {table[worst]:.9g}, the config describes "
                f"{expected[worst]:.9g} ({_parameters(described.get_text_config())}): "
                "the model was built before the config was set; rebuild it from the config"
            )
        if abs(scaling - factor) > RELATIVE_TOLERANCE * factor:
            raise UserError(
                f"{name}.attention_scaling is {scaling:.9g}, the config describes {factor:.9g}; "
                "rebuild the model from the config"
            )


def head_size(text: PreTrainedConfig) -> int:
    """D, columns of a head, of a text config."""
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def rotary_modules(model: nn.Module) -> dict[str, Any]:
    """The modules that hold a table ``inv_freq``, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "inv_freq", None), torch.Tensor)
    }


def fix_rotary_buffers(model: nn.Module) -> None:
    """Put fp32 tables back where a cast has rounded them; tables in fp32 are left alone.

    The tables come from a fresh module of the same class and config, so they are bitwise those of
    a model that was never cast.
    """
    for module in rotary_modules(model).values():
        buffers = list(module.buffers(recurse=False))
        if any(buffer.dtype != torch.float32 for buffer in buffers):
            _renew_buffers(module, buffers[0].device)


def restore_rotary_buffers(model: nn.Module) -> None:
    """Give the rotary modules of a model on the meta device real tables, on the CPU.

    Raises:
        UserError: the model has other buffers too, whose values nobody knows.
    """
    for module in rotary_modules(model).values():
        _renew_buffers(module, torch.device("cpu"))
    unknown = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if unknown:
        raise UserError(
            f"train.partitioned_init = true: {type(model).__name__} has buffers besides RoPE's "
            f"({', '.join(unknown[:3])}), which are not built in parts; set it to false"
        )


def _renew_buffers(module: Any, device: torch.device) -> None:
    with torch.device("cpu"):
        fresh = type(module)(module.config)
    for name, buffer in fresh.named_buffers(recurse=False):
        setattr(module, name, buffer.to(device=device))


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the parameters of ``model`` in place; buffers, and with them RoPE, keep their dtype."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model


def fixed_dynamic_theta(theta: float, factor: float, length: int, original: int, dim: int) -> float:
    """The base at which dynamic NTK scaling arrives for ``length`` tokens."""
    stretch = factor * length / original - (factor - 1)
    return theta * max(stretch, 1.0) ** (dim / (dim - 2))


def _parameters(text: PreTrainedConfig) -> dict[str, Any]:
    rope = getattr(text, "rope_parameters", None)
    if not rope or "rope_theta" not in rope:
        raise UserError(
            f"{text.model_type} model with rope_parameters = {rope}: positions must come from one "
            "RoPE for all layers; train another model"
        )
    return dict(rope)


def _check_parameters(
    text: PreTrainedConfig,
    new: dict[str, Any],
    factor: float | None,
    rope_type: str | None,
    max_position_embeddings: int | None,
) -> None:
    kind = new["rope_type"]
    if kind == "dynamic" and (rope_type or factor or max_position_embeddings):
        head_dim = head_size(text)
        original = text.max_position_embeddings
        length = max_position_embeddings or original
        theta = fixed_dynamic_theta(
            new["rope_theta"], new.get("factor") or length / original, length, original, head_dim
        )
        raise UserError(
            "model.rope.type = dynamic: its table depends on the longest position of each forward, "
            "so the ranks of one window would use different ones; for windows of "
            f"{length} tokens set model.rope.type: default and model.rope.theta: {theta:.10g}, the "
            "base it arrives at"
        )
    if kind not in ("default", "dynamic", *NEEDS_FACTOR):
        raise UserError(_unknown(kind))
    if kind in NEEDS_FACTOR and new.get("factor") is None:
        raise UserError(
            f"model.rope.type = {kind} needs model.rope.factor: the new context length divided by "
            "the original one"
        )
    if kind in NEEDS_ORIGINAL and new.get("original_max_position_embeddings") is None:
        raise UserError(
            f"model.rope.type = {kind} needs model.rope.original_max_position_embeddings: the "
            "context length the model was trained at"
        )
    if kind == "default" and factor is not None:
        raise UserError(
            f"model.rope.factor = {factor} has no effect on RoPE type 'default'; set "
            "model.rope.type (linear, yarn or llama3) or leave the factor out"
        )


def _llama3(inv_freq: np.ndarray, rope: dict[str, Any]) -> np.ndarray:
    """Long waves are divided by the factor, short ones kept, those between blended."""
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = original * inv_freq / (2 * math.pi)
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return inv_freq * (blend + (1 - blend) / factor)


def _yarn(inv_freq: np.ndarray, theta: float, dim: int, rope: dict[str, Any]) -> np.ndarray:
    """Dimensions that turn often enough are kept, slow ones interpolated, a ramp between."""
    original, factor = rope["original_max_position_embeddings"], rope["factor"]

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(rope.get("beta_fast") or 32)
    high = dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    slow = np.clip((np.arange(len(inv_freq)) - low) / width, 0.0, 1.0)
    return inv_freq * (1 - slow) + inv_freq / factor * slow


def _yarn_attention_factor(rope: dict[str, Any]) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1.0)


def _unknown(kind: str) -> str:
    return (
        f"RoPE type {kind!r} cannot be verified (known: default, linear, yarn, llama3, and dynamic "
        "within the original length); set model.rope.type to one of them"
    )


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in values.items())
