"""The module that is trained: a causal language model and its loss in one forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import UserError
from ..modes import IGNORE
from ..parallel import Plan
from .liger import liger_cross_entropy
from .loss import linear_cross_entropy, token_losses
from .rope import fix_rotary_buffers
from .supported import output_head

Reduction = Literal["sum", "none"]


class TrainModel(nn.Module):
    """A causal language model of transformers that returns the summed loss of this rank's tokens.

    Parameters keep their Hugging Face names behind the prefix ``causal_lm.`` (:data:`PREFIX`).

    Args:
        causal_lm: an enabled model (see :func:`anchorcontext.enable`).
        chunk_tokens: tokens whose logits are held at once.
        loss_kernel: ``"native"`` (:mod:`.loss`) or ``"liger"`` (:mod:`.liger`), which chooses its
            own chunks.

    Raises:
        UserError: the model's head is not a plain linear map.
    """

    def __init__(
        self, causal_lm: PreTrainedModel, chunk_tokens: int = 1024, loss_kernel: str = "native"
    ) -> None:
        super().__init__()
        if chunk_tokens < 1:
            raise UserError(f"chunk_tokens = {chunk_tokens}: take at least 1 token a chunk")
        self.causal_lm = causal_lm
        self.loss_of = _HeadLoss(output_head(causal_lm), chunk_tokens, loss_kernel)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        labels: torch.Tensor,
        plan: Plan,
        reduction: Reduction = "sum",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cross-entropy of this rank's tokens, summed, or of each one.

        Args:
            input_ids, position_ids: (B, S) int64, the rank's shard.
            labels: (B, S) int64 targets, shifted once on the whole window; -100: no target. Never
                shifted again here.
            plan: of this micro-batch.
            reduction: ``"none"`` is for evaluation: without gradients, always our own kernel.

        Returns:
            the sum, fp32 (); how many tokens have a target, int64 (). Without any target the sum
            is exactly 0 and its gradients are zero, so every rank runs every collective.
            For ``"none"``: each token's loss, fp32 (B, S), 0 without a target; whether its target
            has the largest logit, bool (B, S).
        """
        hidden = self.hidden_states(input_ids, position_ids, plan)
        self.loss_of.register_partitioned_weight()
        if reduction == "none":
            losses, hits = self.loss_of(hidden, labels, reduction)
            return losses, hits
        return self.loss_of(hidden, labels), (labels != IGNORE).sum()

    def hidden_states(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, plan: Plan
    ) -> torch.Tensor:
        """(B, S, D): the decoder's output after its last norm."""
        decoder = self.causal_lm.get_decoder()
        output = decoder(input_ids=input_ids, position_ids=position_ids, plan=plan, use_cache=False)
        return output.last_hidden_state

    def logits_chunks(
        self, hidden: torch.Tensor, chunk_tokens: int | None = None
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """The model's own logits of ``hidden`` (B, S, D), never all held at once.

        Yields:
            a slice of the S tokens and their logits, (B, tokens of the slice, V) fp32.
        """
        head = self.causal_lm.get_output_embeddings()
        step = chunk_tokens or self.loss_of.chunk_tokens
        for start in range(0, hidden.shape[1], step):
            tokens = slice(start, min(start + step, hidden.shape[1]))
            yield tokens, head(hidden[:, tokens]).float()

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        """Every cast and move of the module comes through here; RoPE's tables stay fp32."""
        result = super()._apply(fn, recurse)
        fix_rotary_buffers(self.causal_lm)
        return result


PREFIX = "causal_lm."


class _HeadLoss(nn.Module):
    """The loss from hidden states, in a module of its own.

    Under ZeRO-3 the head's weight is partitioned and this module reads it outside of the head's
    own forward, so DeepSpeed is told to gather it for this module, and for no longer.
    """

    def __init__(self, head: nn.Linear, chunk_tokens: int, kernel: str) -> None:
        super().__init__()
        self.chunk_tokens = chunk_tokens
        self.kernel = kernel
        # In a tuple: the head must not become a second submodule with a second name.
        self._head = (head,)

    def forward(
        self, hidden: torch.Tensor, labels: torch.Tensor, reduction: Reduction = "sum"
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        weight = self._head[0].weight
        if reduction == "none":
            return token_losses(hidden, weight, labels, self.chunk_tokens)
        if self.kernel == "liger":
            return liger_cross_entropy(hidden, weight, labels)
        return linear_cross_entropy(hidden, weight, labels, self.chunk_tokens)

    def register_partitioned_weight(self) -> None:
        """Under ZeRO-3, and only there, make DeepSpeed gather the weight for this module."""
        weight = self._head[0].weight
        if hasattr(weight, "ds_id") and not hasattr(self, "_external_params"):
            from deepspeed.zero import register_external_parameter

            register_external_parameter(self, weight)
