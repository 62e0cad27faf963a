"""``attention``, ``positions``, ``parallel`` and ``loss``: what is computed, and where."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from anchorcontext.config.base import Section
from anchorcontext.config.sections.types import NonNegativeInt, PositiveFloat, PositiveInt, Text


class AnchorSection(Section):
    """The anchor, varied for experiments (docs/controls.md)."""

    visible: bool = True
    """Whether documents see the anchor of mode ``anchor``; false masks it like a token of another
    document and leaves all positions as they are."""

    position: NonNegativeInt = 0
    """Position of the anchor, or of its copies in front of documents; other tokens keep theirs."""

    token: Literal["bos", "eos"] | NonNegativeInt | None = None
    """Token that stands in the anchor's place and in its copies', put there when a window is read:
    ``bos``, ``eos`` or a token id; null is what ``data.anchor`` prepared."""

    reset_positions: bool = False
    """In mode ``anchor``, positions restart at 1 at each document, so that the anchor with its 0
    stands right before all of them."""

    copies: bool = False
    """In mode ``anchor``, give every document a copy of the anchor instead of one for all, made
    when a window is read. The same numbers up to rounding, at a token more a document.
    ``data.anchor_copies`` makes room for copies when it packs, for mode ``intra_doc``."""


class PrecisionSection(Section):
    """Where attention rounds to ``model.dtype`` on the way from projections to softmax."""

    rope_tables: Literal["model", "fp32"] = "model"
    """Cosines and sines: computed in fp32, then rounded to ``model.dtype`` or kept."""

    rotation: Literal["model", "fp32", "engine"] = "model"
    """Products and sums of RoPE, on queries and keys that come in ``model.dtype``: in it, in fp32,
    or in fp32 by the engine, right before its dot products, which are then of fp32 queries and
    keys. Unrotated ones travel, in ``model.dtype``."""

    qk: Literal["model", "fp32"] = "model"
    """``model`` rounds rotated queries and keys; ``fp32`` hands queries, keys and values over in
    fp32: the whole of attention runs in it, and twice the bytes of bf16 travel. The output is
    rounded to ``model.dtype``."""

    softmax: Literal["fp32"] = "fp32"
    """Scores, their softmax and sums over keys: no engine computes them in less."""

    @property
    def rotates_in_fp32(self) -> bool:
        """Whether the rotary module hands out fp32 tables, so that layers rotate in fp32."""
        return self.rotation == "fp32"

    @property
    def engine_rotates(self) -> bool:
        """Whether queries and keys reach the engine unrotated."""
        return self.rotation == "engine"

    @property
    def attends_in_fp32(self) -> bool:
        """Whether queries, keys and values are fp32 in attention and on the way there."""
        return self.qk == "fp32"


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
    gather or ulysses; a little slower. On GPUs, where engine ``triton`` serves it, so much holds of
    attention."""

    engine: Literal["auto", "flash_attn", "varlen", "cpu", "triton", "flex", "reference"] = "auto"
    """Which kernel computes the tiles on one device; ``auto`` takes the best that serves it."""

    backend: Literal["native", "ring_flash_attn"] = "native"
    """Whose code exchanges and attends: ours, or the package ring-flash-attn (CUDA, modes ``full``
    and ``intra_doc``, layouts ``zigzag`` and ``contiguous``)."""

    anchor: AnchorSection = Field(default_factory=AnchorSection)
    """The anchor, varied for experiments."""

    precision: PrecisionSection = Field(default_factory=PrecisionSection)
    """Where attention rounds to ``model.dtype``."""


class PositionsSection(Section):
    """RoPE positions, varied for experiments (docs/controls.md)."""

    clamp_first: bool = False
    """The first token of every document has position 0 in any mode, the others keep theirs. The
    anchor and its copies do not count as first."""

    offset: NonNegativeInt = 0
    """Added to all positions but the anchor's, its copies' and the clamped ones. Alone it changes
    nothing but rounding: RoPE sees differences of positions."""


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
