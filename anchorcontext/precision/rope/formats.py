"""Number formats, simulated: values rounded to a format and kept in the dtype they had.

``fp8_e4m3`` and ``fp8_e5m2`` (arXiv 2209.05433) reach 448 and 57,344, too little for a tensor as it
comes. As in fp8 attention, a tensor is scaled first so that its largest entry fits, and scaled back
after; by a power of two, so that the scale itself rounds nothing.
"""

from __future__ import annotations

import torch

from ...errors import UserError

FORMATS = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
SCALED = ("fp8_e4m3", "fp8_e5m2")


def check_format(name: str) -> str:
    """``name``, a key of :data:`FORMATS`.

    Raises:
        UserError: it is none.
    """
    if name not in FORMATS:
        raise UserError(f"format {name!r}: choose from {', '.join(FORMATS)}")
    return name


def round_to(x: torch.Tensor, name: str) -> torch.Tensor:
    """``x`` rounded to the nearest numbers of a format, in the dtype of ``x``.

    Too large for fp16 and bf16 becomes infinite, as in a cast. In the fp8 formats the whole tensor
    shares one scale; entries that are not finite stay.
    """
    dtype = FORMATS[name]
    if dtype.itemsize >= x.dtype.itemsize:
        return x
    if name not in SCALED:
        return x.to(dtype).to(x.dtype)
    finite = torch.where(x.isfinite(), x, 0.0)
    scale = _scale(finite, torch.finfo(dtype).max)
    # Through fp32: torch casts to fp8 from there.
    rounded = (finite * scale).float().to(dtype).to(x.dtype) / scale
    return torch.where(x.isfinite(), rounded, x)


def _scale(x: torch.Tensor, most: float) -> torch.Tensor:
    """The largest power of two that keeps |x| times it within ``most``; 1 for zeros."""
    largest = x.abs().max() if x.numel() else x.new_zeros(())
    exponent = torch.log2(most / largest.double()).floor()
    return torch.where(largest > 0, torch.exp2(exponent), 1.0).to(x.dtype)


def lost_positions(name: str, count: int) -> tuple[int | None, int]:
    """What becomes of position ids 0 .. ``count`` - 1 in a format, unscaled.

    Returns:
        the first one that is no number of the format (None: all are), and how many values are left.
    """
    ids = torch.arange(count, dtype=torch.float64)
    dtype = FORMATS[name]
    rounded = ids.clamp(max=torch.finfo(dtype).max) if name in SCALED else ids
    rounded = rounded.float().to(dtype).double() if name in SCALED else rounded.to(dtype).double()
    lost = torch.nonzero(rounded != ids)
    return (int(lost[0]) if len(lost) else None), int(rounded.unique().numel())
