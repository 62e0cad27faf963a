"""One model, several variants of one forward, walked layer by layer together.

A variant is a forward of its own: other position ids, other tokens, another RoPE table. After each
layer the walk stops and shows what that layer handed to attention (rotated q and k, and v) in every
variant, so that two forwards can be compared without keeping either of them.

The layers are the model's own and run unchanged. They call the attention function registered here,
which notes q, k and v exactly as it gets them and returns what transformers' own ``sdpa`` function
returns: the kernel users run, in the model's dtype (fp32 accumulators; probabilities rounded to the
dtype before they meet the values). So every variant's hidden states are those of a stock forward,
bit for bit; nothing that the laboratory computes from q and k flows back into them. The language
model head is never computed.

::

    with Workers() as workers:
        for states in walk(model, input_ids, [Variant(p), Variant(p + 16)], workers=workers):
            states.layer, states.attention[1].query, states.hidden[1]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..errors import UserError
from ..model.supported import check_supported
from .rotary import Rotary
from .workers import Workers

NAME = "anchorcontext_precision"
PROBE_TOKENS = 9


@dataclass(frozen=True)
class Variant:
    """One forward of the walk: positions, int64 (T,); its own tokens or RoPE, where they differ."""

    position_ids: torch.Tensor
    input_ids: torch.Tensor | None = None
    rotary: Rotary | None = None


@dataclass(frozen=True)
class LayerHeads:
    """Heads of a layer: query (Hq, T, D), key and value (Hkv, T, D), the scale.

    Query head h uses key head h // (Hq // Hkv).
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.query.shape[1]

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.query.shape[0]

    def key_head(self, head: int) -> int:
        """The key head that query head ``head`` uses."""
        return head // (self.query.shape[0] // self.key.shape[0])


@dataclass(frozen=True)
class LayerAttention(LayerHeads):
    """What a layer hands to attention: queries and keys are rotated."""

    def without_first(self, count: int = 1) -> LayerAttention:
        """The same layer when nobody sees the first ``count`` tokens: softmax over the others."""
        q, k, v = (x[:, count:] for x in (self.query, self.key, self.value))
        return LayerAttention(q, k, v, self.scaling)


@dataclass(frozen=True)
class LayerStates:
    """After a layer, by variant: what went to attention, and the layer's output (T, hidden).

    With ``same_input`` the output is that of the reference for all.
    """

    layer: int
    attention: list[LayerAttention]
    hidden: list[torch.Tensor]


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    captured: list[LayerAttention] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Note q, k and v in ``captured``; causal attention by transformers' ``sdpa`` function."""
    assert attention_mask is None and captured is not None, "only walk() uses this attention"
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    captured.append(LayerAttention(query[0], key[0], value[0], scaling))
    # Tables of another dtype than the model's leave q and k in the wider of both.
    wide = value.to(query.dtype)
    out, _ = sdpa_attention_forward(module, query, key, wide, None, scaling=scaling, is_causal=True)
    return out.to(value.dtype), None


AttentionInterface.register(NAME, _attention)


def walk(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    variants: Sequence[Variant],
    *,
    workers: Workers,
    same_input: bool = False,
) -> Iterator[LayerStates]:
    """Run all variants through the decoder, one layer at a time, and stop after each layer.

    Memory: hidden states, q, k and v of one layer for all variants; an MLP's inside for as many
    variants as there are workers. Selects the walk's attention function in ``model`` and leaves it
    so; ``model.set_attn_implementation("sdpa")`` goes back.

    Args:
        model: a causal language model of transformers, in eval mode on its device.
        input_ids: int64 (T,), of every variant that has none of its own.
        variants: the first one is the reference of ``same_input``.
        workers: variants are computed side by side.
        same_input: give every variant the reference's input in each layer, so that a layer shows
            its own deviation and not what it inherits.

    Raises:
        UserError: the model has a feature the walk would lose, see :func:`check_walkable`.
    """
    decoder = _prepare(model, input_ids.numel())
    states = list(workers.map(lambda v: _embed(decoder, input_ids, v), variants))
    hidden = [state[0] for state in (states[:1] * len(states) if same_input else states)]
    for index, layer in enumerate(decoder.layers):
        tasks = [
            (layer, x, rope, variant.position_ids)
            for x, (_, rope), variant in zip(hidden, states, variants, strict=True)
        ]
        done = list(workers.map(_run_layer, tasks))
        hidden = [done[0][0] if same_input else out for out, _ in done]
        yield LayerStates(index, [seen for _, seen in done], [x[0] for x in hidden])


def check_walkable(model: PreTrainedModel, workers: Workers) -> None:
    """Run a few tokens through the walk and through the model itself, and compare.

    Raises:
        UserError: the last hidden states differ in a single bit: the decoder does more than embed,
            run its layers and normalise, and the walk would measure another model.
    """
    vocab = model.config.get_text_config().vocab_size
    ids = torch.arange(1, PROBE_TOKENS + 1, device=model.device) * 7919 % vocab
    positions = torch.arange(PROBE_TOKENS, device=model.device)
    hidden = torch.empty(0)
    for states in walk(model, ids, [Variant(positions)], workers=workers):
        hidden = states.hidden[0]
    decoder = model.get_decoder()
    walked = next(workers.map(lambda x: decoder.norm(x[None]), [hidden]))
    model.set_attn_implementation("sdpa")

    def forward(ids: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = decoder(
            input_ids=ids[None], position_ids=positions[None], use_cache=False
        ).last_hidden_state
        return output

    stock = next(workers.map(forward, [ids]))
    if not torch.equal(walked, stock):
        raise UserError(
            f"{type(model).__name__}: walked layer by layer it computes something else than in one "
            f"piece (hidden states differ by up to {(walked - stock).abs().max():.3g}); its "
            "decoder is no plain stack of layers; use a LLaMA, Qwen2, Qwen3 or Mistral model"
        )


def _prepare(model: PreTrainedModel, num_tokens: int) -> Any:
    check_supported(model.config, num_tokens)
    decoder = model.get_decoder()
    missing = [name for name in PARTS if not hasattr(decoder, name)]
    if missing:
        raise UserError(
            f"{type(decoder).__name__} has no {', '.join(missing)}: the walk needs token "
            "embeddings, layers, one RoPE and a last norm; use a LLaMA, Qwen2, Qwen3 or Mistral "
            "model"
        )
    model.set_attn_implementation(NAME)
    return decoder


PARTS = ("embed_tokens", "layers", "rotary_emb", "norm")


def _embed(
    decoder: Any, input_ids: torch.Tensor, variant: Variant
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Hidden states (1, T, hidden) before the first layer, and the cos and sin of all layers."""
    ids = input_ids if variant.input_ids is None else variant.input_ids
    hidden = decoder.embed_tokens(ids[None])
    rotary = variant.rotary or decoder.rotary_emb
    return hidden, rotary(hidden, variant.position_ids[None])


def _run_layer(
    task: tuple[nn.Module, torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, LayerAttention]:
    layer, hidden, position_embeddings, position_ids = task
    captured: list[LayerAttention] = []
    out = layer(
        hidden,
        attention_mask=None,
        position_ids=position_ids[None],
        position_embeddings=position_embeddings,
        use_cache=False,
        captured=captured,
    )
    if len(captured) != 1:
        raise UserError(
            f"{type(layer).__name__} called attention {len(captured)} times through transformers' "
            "attention interface, not once; use a LLaMA, Qwen2, Qwen3 or Mistral model"
        )
    return (out[0] if isinstance(out, tuple) else out), captured[0]
