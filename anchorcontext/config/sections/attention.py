"""``attention``, ``parallel`` and ``loss``: what is computed, and where."""

from __future__ import annotations

from typing import Literal

from anchorcontext.config.base import Section
from anchorcontext.config.sections.types import PositiveFloat, PositiveInt, Text


class AttentionSection(Section):
    """Who sees whom, and how attention runs across ranks."""

    mode: Literal["full", "intra_doc", "intra_doc_reset", "anchor"] = "anchor"
    """Which keys a query sees and which position each token has."""

    layout: Literal["auto", "contiguous", "zigzag", "balanced"] = "auto"
    """Which tokens of a window each rank of its group holds."""

    exchange: Literal["auto", "ring", "gather", "ulysses", "hybrid"] = "auto"
    """How keys and values reach the queries; ``hybrid`` is ulysses in teams, ring among them."""

    ulysses: PositiveInt = 1
    """Ranks of a team that swap tokens for heads; for ``hybrid``, or teams under ``gather``."""

    exact: bool = False
    """Give logits the same bits on any number of ranks, one included, for keys that travel by
    gather or ulysses; a little slower."""

    engine: Literal["auto", "flash_attn", "varlen", "cpu", "triton", "flex", "reference"] = "auto"
    """Which kernel computes the tiles on one device; ``auto`` takes the best that serves it."""

    backend: Literal["native", "ring_flash_attn"] = "native"
    """Whose code exchanges and attends: ours, or the package ring-flash-attn (CUDA, modes ``full``
    and ``intra_doc``, layouts ``zigzag`` and ``contiguous``)."""


class ParallelSection(Section):
    """How ranks share the work: world = dp x sp."""

    sp: PositiveInt = 1
    """Ranks that share one window."""

    hardware: Text = "h100"
    """Profile of the device and its links, by name or as a YAML file (``bench calibrate`` writes
    one). With the model's sizes it gives the costs that ``layout: balanced`` and
    ``exchange: auto`` minimise."""

    exchange_memory: PositiveFloat | None = None
    """Bytes of a device that the buffers of ``exchange: auto`` may take; null is 5 % of its
    memory."""


class LossSection(Section):
    """Cross-entropy over the valid targets of the whole step."""

    boundary: Literal["mask", "train"] = "mask"
    """Whether the last token of a document predicts the first of the next one."""

    chunk_tokens: PositiveInt = 1024
    """Tokens whose logits exist at one time."""

    kernel: Literal["native", "liger"] = "native"
    """``native``: fp32 logits; ``liger``: Liger's fused kernel, faster on GPUs, logits in the
    model's dtype and chunks of its own."""
