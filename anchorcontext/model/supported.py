"""Which models the attention core can serve exactly; everything else is refused by name.

Two gates. :func:`check_supported` reads the config, before any weight is loaded.
:func:`probe_model` runs the built model on tiny windows and looks at what it computes, so a model
that leaves the attention interface, or whose head is more than a matrix product, is caught whatever
its keys are called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import UserError
from ..parallel import make_plan, shard, unshard
from ..window import Window

# Largest relative difference of two logits that should be equal; only mixtures of experts, which
# batch their tokens by content, differ at all (by rounding).
PROBE_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Refusal:
    """One feature that would silently be lost: where it stands in the config, why, what to do."""

    keys: tuple[str, ...]
    present: Callable[[Any], bool]
    rule: str
    fix: str


def _given(value: Any) -> bool:
    return value is not None and value is not False


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


def _scales(value: Any) -> bool:
    return isinstance(value, int | float) and value != 1


_OTHER_MODEL = "train another model, or this one with the key switched off if its weights allow"

REFUSALS = (
    Refusal(
        ("attn_logit_softcapping",),
        _given,
        "attention scores are capped by a tanh, which no engine computes yet",
        _OTHER_MODEL,
    ),
    Refusal(
        ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"),
        _positive,
        "attention dropout is not applied across ranks",
        "set it to 0 in config.json, or in model.scratch",
    ),
    Refusal(
        ("alibi", "use_alibi"),
        _given,
        "ALiBi biases are not applied; positions must come from RoPE",
        _OTHER_MODEL,
    ),
    Refusal(
        ("attention_chunk_size",),
        _given,
        "attention within chunks is not one of the modes",
        _OTHER_MODEL,
    ),
    Refusal(
        ("kv_lora_rank", "qk_rope_head_dim"),
        _given,
        "multi-head latent attention has value heads of another size than its key heads",
        _OTHER_MODEL,
    ),
    Refusal(
        ("add_cross_attention", "is_encoder_decoder"),
        _given,
        "only decoders without cross-attention have a causal plan",
        "train a causal language model",
    ),
    Refusal(
        ("final_logit_softcapping",),
        _given,
        "the loss is computed from lm_head alone, so capped logits would be lost",
        _OTHER_MODEL,
    ),
    Refusal(
        ("logit_scale", "logits_scaling", "lm_head_multiplier"),
        _scales,
        "the loss is computed from lm_head alone, so scaled logits would be lost",
        _OTHER_MODEL,
    ),
    Refusal(
        ("output_router_logits",),
        _given,
        "the router's auxiliary loss is not part of our loss",
        "set it to false",
    ),
    Refusal(
        ("quantization_config",),
        _given,
        "quantised weights cannot be trained",
        "convert the model to bf16 or fp32 first (`anchorcontext import-gguf` for GGUF)",
    ),
)

ATTENTION_SINK_MODELS = frozenset({"gpt_oss"})
ROTARY_NAMES = frozenset({"rope", "rotary"})


def check_supported(config: PreTrainedConfig, window_tokens: int | None = None) -> None:
    """Refuse a model whose attention or head we would not reproduce exactly.

    Args:
        config: the model's config, before or after the model is built.
        window_tokens: tokens of the longest window, if known. A sliding window at least that long
            hides nothing and is allowed; without it every sliding window is refused.

    Raises:
        UserError: names the feature, where it stands in the config, and what to change.
    """
    text = config.get_text_config()
    for refusal in REFUSALS:
        for key in refusal.keys:
            value = getattr(text, key, None)
            if refusal.present(value):
                raise _refused(text, f"{key} = {value!r}", refusal.rule, refusal.fix)
    if text.model_type in ATTENTION_SINK_MODELS:
        raise _refused(
            text,
            f"model_type = {text.model_type!r}",
            "its attention has learned sinks, which the merge of partial results leaves out",
            "train another model",
        )
    scheme = getattr(text, "position_embedding_type", None)
    if scheme is not None and scheme not in ROTARY_NAMES:
        raise _refused(
            text,
            f"position_embedding_type = {scheme!r}",
            "positions must come from RoPE",
            "train another model",
        )
    if not getattr(text, "is_causal", True):
        raise _refused(text, "is_causal = False", "every mode is causal", "train a causal model")
    _check_layer_types(text, window_tokens)


def sliding_window(config: PreTrainedConfig) -> int | None:
    """The sliding window some layer of the model applies, in tokens; None: no layer has one."""
    text = config.get_text_config()
    size = getattr(text, "sliding_window", None)
    if size is None or getattr(text, "use_sliding_window", True) is False:
        return None
    layer_types = getattr(text, "layer_types", None)
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    return int(size)


def _check_layer_types(text: PreTrainedConfig, window_tokens: int | None) -> None:
    layer_types = getattr(text, "layer_types", None) or ()
    other = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if other:
        raise _refused(
            text,
            f"layer_types has {', '.join(map(repr, other))}",
            "every layer must be softmax attention over the visible keys",
            "train another model",
        )
    size = sliding_window(text)
    if size is None or (window_tokens is not None and window_tokens <= size):
        return
    against = "" if window_tokens is None else f" and windows have {window_tokens} tokens"
    raise _refused(
        text,
        f"sliding_window = {size}{against}",
        "a query would lose the keys further back than that, and no engine hides them yet",
        'set "sliding_window": null in config.json (or in model.scratch) to train with full '
        f"attention, or take windows of at most {size} tokens",
    )


def _refused(text: PreTrainedConfig, what: str, rule: str, fix: str) -> UserError:
    return UserError(f"{text.model_type} model with {what}: {rule}; {fix}")


@torch.no_grad()
def probe_model(model: PreTrainedModel) -> None:
    """Run two tiny windows through the model and check what the config cannot tell.

    The windows hold two documents each and differ in the first document only. Refused are a model
    whose second document notices (some layer does not go through the attention interface), whose
    second document does not notice its own first token (no attention at all), or whose logits are
    not its head applied to its decoder's output.

    ``model``: enabled, with its weights on a device (not partitioned); left in the mode it was in.

    Raises:
        UserError: names what was found.
    """
    logits, from_head = _probe_logits(model)
    name, scale = type(model).__name__, logits.abs().max()
    base, other, own = logits[:, 3:]
    if not torch.isfinite(logits).all():
        raise UserError(
            f"{name} gives logits that are not finite on 7 tokens: its weights are damaged; load "
            "another checkpoint"
        )
    if (base - other).abs().max() > PROBE_TOLERANCE * scale:
        raise UserError(
            f"{name}: a token of one document changes the logits of another, so some layer mixes "
            "tokens outside transformers' attention interface; train a model whose layers are all "
            "softmax attention (LLaMA, Qwen2, Qwen3, Mistral)"
        )
    if torch.equal(base[-1], own[-1]):
        raise UserError(
            f"{name}: the last token's logits do not depend on the document's first token; the "
            "weights have not been loaded, or the model has no attention"
        )
    error = float((logits - from_head).abs().max())
    if error > PROBE_TOLERANCE * scale:
        raise UserError(
            f"{name}: logits differ from lm_head(hidden states) by up to {error:.3g}; the loss is "
            "computed from lm_head alone, so a scale or cap on the logits would be lost; train "
            "another model"
        )


def _probe_logits(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (3, 7, V) in fp32 of three windows, by the model and by its head alone.

    Documents of 3 and 4 tokens; the second window differs from the first in its first document,
    the third in the first token of its second document.
    """
    vocab = model.config.get_text_config().vocab_size
    a, b, c = vocab // 3, vocab // 2, vocab - 1
    contents = [[a, b, c, a, c, b, c], [b, c, a, a, c, b, c], [a, b, c, c, c, b, c]]
    windows = [Window(ids, [0, 3, 7], "intra_doc") for ids in contents]
    plan = make_plan(windows)
    local = shard(windows, plan, model.device)
    inputs = {"input_ids": local.input_ids, "position_ids": local.position_ids, "plan": plan}
    training = model.training
    model.eval()
    try:
        logits = model(**inputs).logits
        from_head = model.get_output_embeddings()(model.get_decoder()(**inputs).last_hidden_state)
    finally:
        model.train(training)
    return unshard(logits.float(), plan), unshard(from_head.float(), plan)


def output_head(model: PreTrainedModel) -> nn.Linear:
    """The model's head, a linear map without bias from hidden states to logits.

    Raises:
        UserError: the head is something else.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise UserError(
            f"{type(model).__name__} has the head {head}: the chunked loss needs a linear head "
            "without bias; train another model"
        )
    return head
