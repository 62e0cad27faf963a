"""The loss by Liger's fused kernel: faster on GPUs than ours, with logits rounded to the dtype.

Liger-Kernel (arXiv 2410.10989) multiplies a chunk of hidden states with the head's weight in their
own dtype, so bf16 logits are rounded to 8 bits before the softmax, where ours stay fp32; from there
on it computes in fp32. Its weight gradient is asked to add up in fp32.
"""

from __future__ import annotations

import importlib.util
import os

import torch

from ..errors import UserError
from ..modes import IGNORE


def check_liger(device: torch.device) -> None:
    """Whether Liger can run on ``device``; imports nothing.

    Raises:
        UserError: it is not installed, or has no GPU here.
    """
    if importlib.util.find_spec("liger_kernel") is None:
        raise UserError(
            "loss.kernel = liger: Liger-Kernel is not installed; "
            "pip install 'anchorcontext[liger]', or set loss.kernel=native"
        )
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError(
            f"loss.kernel = liger: its kernels run on GPUs, not on {device.type}; set "
            "loss.kernel=native"
        )


def liger_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Sum of the cross-entropy over the tokens that have a target.

    Args:
        hidden: (..., D) hidden states, fp32, bf16 or fp16.
        weight: (V, D) of the head, same dtype.
        labels: (...) int64 class of each token, already shifted; -100: no target.

    Returns:
        fp32 scalar; differentiable in hidden and weight. Exactly 0, with zero gradients, without
        any target.
    """
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    loss = liger_fused_linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.reshape(-1),
        ignore_index=IGNORE,
        reduction="sum",
        accum_dtype=torch.float32,
    )
    assert isinstance(loss, torch.Tensor)
    return loss.float()
