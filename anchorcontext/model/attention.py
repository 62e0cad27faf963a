"""Our attention as an attention function of transformers: registered, selected, never patched in.

``enable(model)`` selects it. From then on the model is called with the plan of its windows::

    model(input_ids, position_ids=..., plan=plan)

transformers hands unknown keyword arguments of ``model(...)`` to the attention function of every
layer, with gradient checkpointing too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from anchorcontext.kernels import Rotation

from ..errors import UserError
from ..parallel import Plan, distributed_attention
from .precision import cast_heads
from .supported import check_supported

if TYPE_CHECKING:
    from ..config.sections import PrecisionSection

NAME = "anchorcontext"

# What a layer may ask of its attention function and this one would lose.
REFUSED_ARGUMENTS = {
    "softcap": "a cap on the scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a position bias",
    "head_mask": "a head mask",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
    "cu_seq_lens_q": "its own document boundaries (the plan has them)",
}


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    plan: Plan | None = None,
    precision: PrecisionSection | None = None,
    rotations: Sequence[Rotation] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over the plan's windows, as transformers calls it in every layer.

    Args:
        module: the layer's attention module.
        query: (B, Hq, S, D) this rank's queries, rotated unless the engine is to do it.
        key, value: (B, Hkv, S, D).
        attention_mask: must be None; the plan is the mask.
        scaling: multiplies the dot products.
        dropout: must be 0.
        plan: of this micro-batch.
        precision: the dtypes of :mod:`.precision`; None: queries, keys and values as they come.
        rotations: of the plan's steps, for queries and keys that come unrotated
            (:mod:`.rotation`).

    Returns:
        (B, S, Hq, D) in the values' dtype, and None in place of the attention weights, which are
        never formed.

    Raises:
        UserError: no plan, or something is asked for that the plan cannot honour.
    """
    if plan is None:
        raise UserError(
            f"{type(module).__name__} got no plan: enable(model) and call it with plan=; if that "
            "was done, the model does not hand keyword arguments on to its layers; train one that "
            "does (LLaMA, Qwen2, Qwen3, Mistral)"
        )
    if attention_mask is not None:
        raise UserError(_MASK)
    _check_request(module, plan, dropout, kwargs)
    _check_shapes(module, query, key, value)
    heads = cast_heads(query, key, value, precision)
    out = distributed_attention(*heads, plan, scaling, rotations)
    return out.to(value.dtype).transpose(1, 2), None


def _check_request(module: nn.Module, plan: Plan, dropout: float, kwargs: dict[str, Any]) -> None:
    """Refuse what the layer asks for and the plan would lose."""
    layer = type(module).__name__
    if dropout:
        raise UserError(
            f"{layer} asks for attention dropout {dropout}: it is not applied across ranks; set "
            "attention_dropout to 0 in the model's config"
        )
    window = kwargs.get("sliding_window")
    if window is not None and window < plan.length:
        raise UserError(
            f"{layer} asks for a sliding window of {window} tokens in a window of {plan.length}: "
            "no engine hides the keys before it; set sliding_window to null in the model's config"
        )
    for name, what in REFUSED_ARGUMENTS.items():
        if kwargs.get(name) is not None:
            raise UserError(f"{layer} asks for {what} ({name}), which no engine computes")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UserError(f"{layer} asks for attention to later tokens: every mode is causal")
    if kwargs.get("output_attentions"):
        raise UserError("output_attentions=True: attention weights are never formed; leave it out")


def _check_shapes(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    layer = type(module).__name__
    if key.shape[2] != query.shape[2]:
        raise UserError(
            f"{layer} got {query.shape[2]} queries and {key.shape[2]} keys: a planned forward has "
            "no cache; call the model with use_cache=False and without past keys"
        )
    if value.shape[3] != key.shape[3]:
        raise UserError(
            f"{layer} has key heads of {key.shape[3]} and value heads of {value.shape[3]}: "
            "attention with two head sizes is not supported"
        )


AttentionInterface.register(NAME, attention_forward)


def enable(model: PreTrainedModel) -> PreTrainedModel:
    """Select our attention in every layer of ``model``; nothing is patched or replaced.

    Afterwards ``model(...)`` needs ``plan=``. ``model.set_attn_implementation("sdpa")`` goes back
    to stock attention. Calling it twice is the same as once.

    Raises:
        UserError: the model has a feature that would be lost, or layers that do not go through
            transformers' attention interface.
    """
    check_supported(model.config, _longest_position(model))
    if not isinstance(model, PreTrainedModel) or not hasattr(model, "get_decoder"):
        raise UserError(f"{type(model).__name__} is no causal language model of transformers")
    model.set_attn_implementation(NAME)
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        chosen = getattr(config, "_attn_implementation", NAME)
        if "Attention" in type(module).__name__ and chosen != NAME:
            raise UserError(
                f"{name} ({type(module).__name__}) of {type(model).__name__} still uses "
                f"{chosen!r} attention: the model does not go through transformers' attention "
                "interface; train one that does (LLaMA, Qwen2, Qwen3, Mistral)"
            )
    if model.config.get_text_config()._attn_implementation != NAME:
        raise UserError(
            f"{type(model).__name__} does not go through transformers' attention interface; train "
            "one that does (LLaMA, Qwen2, Qwen3, Mistral)"
        )
    decoder = model.get_decoder()
    if _check_decoder_call not in decoder._forward_pre_hooks.values():
        # transformers drops a 2-D mask before any attention function sees it: look for it here.
        decoder.register_forward_pre_hook(_check_decoder_call, with_kwargs=True)
    return model


def _longest_position(model: PreTrainedModel) -> int | None:
    """A window cannot be longer than this, so a sliding window of that size hides nothing."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def _check_decoder_call(
    decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before a decoder runs under our attention: a plan, no mask, no cache."""
    if decoder.config._attn_implementation != NAME:
        return None
    if kwargs.get("plan") is None:
        raise UserError(_NO_PLAN)
    if kwargs.get("attention_mask") is not None or (len(args) > 1 and args[1] is not None):
        raise UserError(_MASK)
    if kwargs.get("cache") is not None or kwargs.get("past_key_values") is not None:
        raise UserError("a planned forward has no cache; leave out past_key_values")
    # The cache is on by default in most configs and would hold every layer's keys for nothing.
    return args, {**kwargs, "use_cache": False}


_NO_PLAN = (
    "the model was called without plan=: this attention needs the plan of its windows; call "
    "model(input_ids, position_ids=..., plan=make_plan(windows)), or go back to stock attention "
    'with model.set_attn_implementation("sdpa")'
)
_MASK = (
    "the model was called with an attention_mask: the plan is the mask (documents, anchor, "
    "padding); leave attention_mask out"
)
