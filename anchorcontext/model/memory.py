"""What trades activation memory for work: checkpointed layers, kept attention, chunked MLPs.

None of it changes a model's parameters or their names, and gradients are those of the plain model:
bit for bit, but for a chunked MLP, whose weight gradients are summed chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..errors import UserError
from ..parallel.keep import keep_attention

if TYPE_CHECKING:
    from ..config.sections import ModelSection


def save_memory(model: PreTrainedModel, section: ModelSection) -> None:
    """Apply the memory levers of a ``model:`` section to an enabled model, in place.

    Raises:
        UserError: the model's MLPs cannot be computed in chunks of tokens.
    """
    if section.mlp_chunk_tokens is not None:
        chunk_mlps(model, section.mlp_chunk_tokens)
    if section.gradient_checkpointing:
        checkpoint_layers(
            model,
            every=section.checkpoint_every,
            keep=section.keep_attention,
            offload=section.offload_activations,
        )


def checkpoint_layers(
    model: PreTrainedModel, *, every: int = 1, keep: bool = False, offload: bool = False
) -> None:
    """Recompute layers 0, ``every``, 2 ``every``, ... in backward instead of storing them.

    Args:
        keep: their attention is not recomputed (:mod:`anchorcontext.parallel.keep`).
        offload: what they keep waits in pinned host memory; nothing changes on a CPU.
    """
    # Dropout is refused, so that no recomputation needs the generator's state.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    offload = offload and torch.cuda.is_available()
    if keep:
        options["context_fn"] = partial(keep_attention, offload)
    # transformers 5.17 has it under its older name only.
    switch_on = getattr(model, "activation_checkpointing_enable", None)
    switch_on = switch_on or model.gradient_checkpointing_enable
    switch_on(options, every_n_layers=every, offload=offload)


def chunk_mlps(model: PreTrainedModel, chunk_tokens: int) -> None:
    """Put a :class:`ChunkedMLP` in the place of every decoder layer's MLP.

    Raises:
        UserError: a layer has no ``mlp``, or one with parameters of its own.
    """
    for number, layer in enumerate(model.get_decoder().layers):
        mlp = getattr(layer, "mlp", None)
        if mlp is None or any(True for _ in mlp.parameters(recurse=False)):
            raise UserError(
                f"model.mlp_chunk_tokens = {chunk_tokens}: layer {number} "
                f"({type(layer).__name__}) has no MLP made of linear maps under the name mlp; "
                "leave it out, or train a LLaMA, Qwen2, Qwen3 or Mistral"
            )
        layer.mlp = ChunkedMLP(mlp, chunk_tokens)


class ChunkedMLP(nn.Module):
    """An MLP computed ``chunk_tokens`` tokens at a time, each chunk checkpointed by itself.

    Its intermediate exists for one chunk only, in forward and in backward. It has the children of
    ``mlp`` under their own names, so parameters keep theirs and hooks of the children (ZeRO-3
    gathers weights in them) see every call.

    Args:
        mlp: maps each token (..., h) by itself.
    """

    def __init__(self, mlp: nn.Module, chunk_tokens: int) -> None:
        super().__init__()
        self.chunk_tokens = chunk_tokens
        for name, child in mlp.named_children():
            self.add_module(name, child)
        # In a tuple: the MLP must not become a submodule, which would rename the parameters.
        self._whole = (mlp,)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden (B, S, h) -> (B, S, h)."""
        compute: Callable[[torch.Tensor], torch.Tensor] = self._whole[0]
        if torch.is_grad_enabled():
            compute = partial(checkpoint, compute, use_reentrant=False, preserve_rng_state=False)
        return torch.cat([compute(chunk) for chunk in hidden.split(self.chunk_tokens, 1)], dim=1)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile what a chunk runs; chunks and their checkpoints stay outside."""
        self._whole[0].compile(*args, **kwargs)

    def extra_repr(self) -> str:
        """Shown by ``repr(model)``."""
        return f"chunk_tokens={self.chunk_tokens}"
