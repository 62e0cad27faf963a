"""``model``: weights, RoPE, and what is kept of a layer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from anchorcontext.config.base import Section
from anchorcontext.config.sections.types import Dtype, PositiveFloat, PositiveInt, Text


class RopeSection(Section):
    """Rotary position embedding; null keeps what the checkpoint or ``scratch`` says."""

    theta: PositiveFloat | None = None
    """RoPE base; the paper takes 1e6 at 16K and 32K, 5e6 at 64K, 1e7 at 128K, 5e7 at 256K."""

    type: Literal["default", "linear", "dynamic", "yarn", "llama3"] | None = None
    """Scaling type, by its name in transformers."""

    factor: Annotated[float, Field(ge=1)] | None = None
    """Scaling factor: the new context length divided by the original one."""

    original_max_position_embeddings: PositiveInt | None = None
    """Context length before scaling, for the types that need it."""

    extra: dict[str, Any] = Field(default_factory=dict)
    """Further parameters of the scaling type, such as yarn's ``beta_fast``."""


class ModelSection(Section):
    """The model: pretrained (``path``) or with random weights (``scratch``), one of the two."""

    path: Text | None = None
    """Hugging Face model folder or hub name."""

    scratch: dict[str, Any] | None = None
    """``model_type`` and the keys of its transformers config, for random initial weights."""

    dtype: Dtype = "bf16"
    """Type of weights and activations; losses, softmax statistics and accumulators are fp32."""

    rope: RopeSection = Field(default_factory=RopeSection)
    """Rotary position embedding."""

    max_position_embeddings: PositiveInt | None = None
    """Context length written into the export; null takes the larger of the model's own and the
    window's."""

    gradient_checkpointing: bool = True
    """Recompute each layer's activations in backward instead of storing them."""

    checkpoint_every: PositiveInt = 1
    """Checkpoint layers 0, n, 2n, ... alone; the others store their activations."""

    keep_attention: bool = False
    """A checkpointed layer keeps attention's output and log-sum-exp, so that neither attention nor
    its exchange runs again in backward."""

    offload_activations: bool = False
    """Hold what checkpointed layers keep in pinned host memory until backward."""

    mlp_chunk_tokens: PositiveInt | None = None
    """Compute MLPs so many tokens at a time, each chunk checkpointed by itself; null takes all at
    once."""

    compile: bool = False
    """Compile norms and MLPs with torch.compile; not under ZeRO-3."""
