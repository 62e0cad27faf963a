"""Dense attention and its mask: the definition, sharing no code with what it judges."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def dense_mask(documents: Sequence[int], mode: str) -> torch.Tensor:
    """bool (L, L): query i sees key j, straight from the table of modes.

    ``documents``: (L,) the document of each token. Quadratic, token by token; for tests only.
    """
    length = len(documents)
    mask = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        for j in range(i + 1):
            if mode == "full":
                mask[i, j] = True
            elif mode in ("intra_doc", "intra_doc_reset"):
                mask[i, j] = documents[i] == documents[j]
            elif mode == "anchor":
                mask[i, j] = documents[i] == documents[j] or j == 0
            else:
                raise AssertionError(mode)
    return mask


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Softmax attention of one window by plain autograd operations in the tensors' dtype.

    q (Hq, L, D), k and v (Hkv, L, D), mask bool (L, L) -> (Hq, L, D).
    """
    groups = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = (q @ k.transpose(-1, -2)) * scale
    scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ v
