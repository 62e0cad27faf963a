"""RoPE that an engine applies by itself, in fp32, right before the dot product.

Stock models rotate queries and keys in the model's dtype and hand over the rounded result. An
engine that takes a `Rotation` gets them unrotated and keeps the rotated values in fp32 registers:
the control for what rounding the rotation to bf16 costs, at the memory of flash attention. Any
other engine is given rotated copies: :mod:`.rotating`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Rotation:
    """Cosines and sines of the angles of every row, contiguous fp32 (rows, D / 2).

    Column d rotates with column d + D / 2, by ``position * theta^(-2 d / D)``: RoFormer (arXiv
    2104.09864) in the column order of Hugging Face models.

    Attributes:
        q_cos, q_sin: of the N query rows.
        k_cos, k_sin: of the M key rows.
        anchor_cos, anchor_sin: of the A anchors' keys; needed only in a call with anchors.
    """

    q_cos: torch.Tensor
    q_sin: torch.Tensor
    k_cos: torch.Tensor
    k_sin: torch.Tensor
    anchor_cos: torch.Tensor | None = None
    anchor_sin: torch.Tensor | None = None


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x`` (rows, H, D) rotated by the angles of each row (rows, D / 2), in the wider dtype.

    The transpose, and but for a factor on the tables the inverse, is ``rotate(x, cos, -sin)``.
    """
    first, second = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
