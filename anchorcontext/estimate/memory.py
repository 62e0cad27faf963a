"""Memory of one rank in bytes, term by term, in closed form.

*States* follow what DeepSpeed 0.19 holds under ``train/engine.py``, counted tensor by tensor on two
ranks for both dtypes and the stages 0 to 3. N parameters, W ranks, w bytes of a weight:

=====  ==========  =======  =======  =======  ===================================
stage  dtype       weights  masters  moments  gradients
=====  ==========  =======  =======  =======  ===================================
0      fp32        4 N      none     8 N      4 N from backward to step
0      bf16        2 N      4 N      8 N      4 N from backward to step
1      bf16        2 N      4 N / W  8 N / W  4 N always, 2 N bf16 in backward
1      fp32        4 N      4 N / W  8 N / W  4 N / W from backward to step
2      both        w N      4 N / W  8 N / W  4 N / W from backward to step
3      both        w N / W  4 N / W  8 N / W  4 N / W always
=====  ==========  =======  =======  =======  ===================================

*Activations* are the tensors that autograd keeps of a pre-norm decoder layer with a gated MLP, as
transformers writes it (``h`` hidden, ``i`` intermediate size, ``e`` bytes of an element), a token:

* two RMS norms, each its fp32 input, its normalised and its scaled output: ``2 (4 h + 2 e h + 4)``;
* attention: queries, keys, values, output, log-sum-exp: ``a D (2 Hq + 2 Hkv) + 4 Hq``, where a is e
  or, with ``attention.precision.qk: fp32``, 4 bytes, and then the rounded output, ``e D Hq``;
* gated MLP: gate, up, activation, product: ``4 e i``.

Cosines and sines are there once, for a token ``2 e D``, or fp32; where the engine rotates, ``4 D``
for each row of a rank and each key row that it receives. An engine that is given rotated copies
works with fp32 queries, keys, values, outputs and gradients beside them.

A checkpointed layer keeps its input, ``e h``, and with ``keep_attention`` attention's output and
log-sum-exp, ``(a D + 4) Hq``; with ``offload_activations`` the device keeps neither. A chunked MLP
keeps nothing, and works with ``6 e i`` for one chunk's tokens and ``e h`` for all.

The peak is the largest of the *phases* of a step. Between them memory changes linearly (gradients
grow while activations go), so that no moment between two phases is worse than both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config.deepspeed import optimizer_device
from ..train.costs import attention_element_size, checkpointed_layers
from ..watch.sizes import ModelSizes

if TYPE_CHECKING:
    from ..config import Config

# Defaults of DeepSpeed's zero_optimization options, in elements.
REDUCE_BUCKET = 500_000_000
PREFETCH_BUCKET = 50_000_000
FP32 = 4


@dataclass(frozen=True)
class StateMemory:
    """Weights, gradients and optimiser of one rank, bytes."""

    weights: int
    """What the rank keeps of them."""
    gathered: int
    """ZeRO-3: weights of other ranks, held for the layers at work."""
    masters: int
    """fp32 copies that the optimiser updates."""
    moments: int
    """Adam's two."""
    gradients_kept: int
    """Allocated at all times."""
    gradients_made: int
    """Allocated in backward and freed with the step."""
    bucket: int
    """Buffers of the gradient reduction, allocated as backward starts."""
    reduction: int
    """The fp32 copy of a bucket that is on its way."""

    @property
    def always(self) -> int:
        """Held through the whole step."""
        return self.weights + self.gathered + self.masters + self.moments + self.gradients_kept


@dataclass(frozen=True)
class ActivationMemory:
    """What one micro-batch of ``tokens`` tokens a rank needs, bytes."""

    stored: int
    """Kept from forward to backward in all layers: their inputs alone with checkpointing."""
    last_norm: int
    """Kept of the norm behind the last layer; gone when backward reaches a layer."""
    recomputed: int
    """The activations of the one layer that backward works on; 0 without checkpointing."""
    mlp_work: int
    """Gradients of activation and gate: the product is freed before they are made."""
    attention_work: int
    """fp32 accumulators of attention's backward, less what the layer's MLP has freed by then."""
    exchange: int
    """Key rows held and on their way, and their gradients."""
    loss: int
    """Gradients of the hidden states and the head in fp32, and two chunks of logits."""
    loss_kept: int
    """What backward holds of it in the layers: the head's gradient and the hidden states'."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of the busiest rank; ``peak`` is the largest phase."""

    states: StateMemory
    activations: ActivationMemory
    phases: dict[str, int]
    device_bytes: float

    @property
    def peak(self) -> int:
        """Bytes at the worst moment of a step."""
        return max(self.phases.values())

    @property
    def fits(self) -> bool:
        """Whether the device holds the peak; the runtime's own memory (CUDA context, NCCL buffers,
        fragmentation: 1 to 3 GB) is left out."""
        return self.peak <= self.device_bytes


def estimate_memory(
    states: StateMemory, activations: ActivationMemory, accumulation: int, device_bytes: float
) -> MemoryEstimate:
    """Put the terms together, phase by phase.

    Args:
        accumulation: micro-batches a step; after the first, gradients are there all the time.
    """
    always = states.always + (states.gradients_made if accumulation > 1 else 0)
    work = activations
    backward = always + states.bucket + work.stored + work.recomputed + work.loss_kept
    phases = {
        "loss": always + work.stored + work.last_norm + work.loss,
        "backward of an MLP": backward + work.mlp_work,
        "backward of attention": backward + work.attention_work + work.exchange,
        "gradient reduction": states.always
        + states.gradients_made
        + states.bucket
        + states.reduction,
    }
    return MemoryEstimate(states, activations, phases, device_bytes)


def state_memory(
    sizes: ModelSizes, config: Config, world_size: int, *, lazy: bool = False
) -> StateMemory:
    """Weights, gradients and optimiser of one rank.

    Args:
        lazy: an allocated buffer takes memory only where it is touched, as on a CPU; what is
            offloaded to the host stays in the same memory there.
    """
    stage, bf16 = config.train.zero_stage, config.model.dtype == "bf16"
    n, part = sizes.parameters, -(-sizes.parameters // world_size)
    size = 2 if bf16 else FP32
    zero = zero_options(config)
    asked = int(zero.get("reduce_bucket_size", REDUCE_BUCKET))
    filled = min(n, asked)
    allocated = filled if lazy else asked
    kept = made = bucket = reduction = gathered = 0
    if stage == 0:
        made, reduction = FP32 * n, FP32 * filled
    elif stage == 1 and bf16:
        kept, made, reduction = FP32 * n, size * n, FP32 * filled
    elif stage < 3:
        made, bucket = FP32 * part, size * allocated
        reduction = FP32 * filled if bf16 else 0
    else:
        kept, bucket = FP32 * part, FP32 * allocated
        largest = max(sizes.layer_parameters, sizes.head_weights)
        ahead = int(zero.get("stage3_prefetch_bucket_size", PREFETCH_BUCKET))
        gathered = size * min(n - part, largest + ahead)
    masters = 0 if stage == 0 and not bf16 else FP32 * (part if stage else n)
    moments = 2 * FP32 * (part if stage else n) if config.optimizer.type == "adamw" else 0
    if optimizer_device(config) != "none" and not lazy:
        masters = moments = 0
    weights = size * (part if stage == 3 else n)
    if stage == 3 and _offloaded(zero, "offload_param") and not lazy:
        weights = 0
    return StateMemory(weights, gathered, masters, moments, kept, made, bucket, reduction)


def activation_memory(
    sizes: ModelSizes,
    config: Config,
    *,
    tokens: int,
    key_rows: int,
    step_rows: int,
    received_rows: int,
    sp_size: int,
    ulysses: int,
    on_cpu: bool,
) -> ActivationMemory:
    """What a micro-batch needs on its busiest rank.

    Args:
        tokens: rows of a rank, windows times local length, padding included.
        key_rows: most foreign key rows that it holds and receives at one time.
        step_rows: most foreign key rows of one step.
        received_rows: foreign key rows of all steps.
        ulysses: ranks that swap heads.
    """
    e, a = _weight_element_size(config), attention_element_size(config)
    h, i, width = sizes.hidden_size, sizes.intermediate_size, sizes.head_dim
    layer = layer_activation_bytes(sizes, e, ulysses, attention_size=a) * tokens
    freed = tokens * (4 * e * i + FP32 * h + 2 * e * h)
    mlp_work = tokens * 2 * e * i
    if config.model.mlp_chunk_tokens is not None:
        layer -= tokens * 4 * e * i
        freed -= tokens * 4 * e * i
        mlp_work = min(config.model.mlp_chunk_tokens, tokens) * 6 * e * i + tokens * e * h
    offload = config.model.offload_activations and not on_cpu
    stored, recomputed = _kept_activations(config, sizes, tokens, layer, offload)
    precision = config.attention.precision
    rotary = tokens * 2 * (FP32 if precision.rotates_in_fp32 else e) * width
    accumulators = tokens * width * FP32 * (2 * sizes.num_heads + 2 * sizes.num_kv_heads)
    if precision.engine_rotates:
        rotary = FP32 * width * (tokens * ulysses + received_rows)
        if on_cpu or config.attention.engine in ("flex", "reference"):
            accumulators += tokens * width * FP32 * (4 * sizes.num_heads + 3 * sizes.num_kv_heads)
    row = 2 * max(1, sizes.num_kv_heads // ulysses) * width
    exchange = 0
    if sp_size > ulysses:
        own = tokens * ulysses
        exchange = row * (a * (own + key_rows + step_rows) + 3 * FP32 * step_rows)
    chunk = min(config.loss.chunk_tokens, tokens)
    chunks = 1 if chunk == tokens else 2
    head = FP32 * sizes.head_weights
    loss = FP32 * tokens * h + head + chunks * chunk * FP32 * sizes.vocab_size
    if e == 2:  # a CPU multiplies in fp32; a GPU casts the chunk
        loss += head if on_cpu else e * chunk * sizes.vocab_size
    return ActivationMemory(
        stored=rotary + stored,
        last_norm=tokens * (FP32 * h + 2 * e * h + FP32),
        recomputed=recomputed,
        mlp_work=mlp_work,
        attention_work=accumulators - freed,
        exchange=exchange,
        loss=loss,
        loss_kept=head + tokens * e * h,
    )


def _kept_activations(
    config: Config, sizes: ModelSizes, tokens: int, layer: int, offload: bool
) -> tuple[int, int]:
    """What all layers keep until backward, and what backward recomputes on top of that.

    Backward is at its worst at the last layer, or at the last checkpointed one, when those behind
    it are gone.

    Args:
        layer: bytes of all activations of one layer.
        offload: what checkpointed layers keep is on the host.
    """
    model, num_layers = config.model, sizes.num_layers
    checkpointed = checkpointed_layers(config, num_layers)
    hidden = tokens * sizes.hidden_size * _weight_element_size(config)
    attention = tokens * sizes.num_heads * (attention_element_size(config) * sizes.head_dim + FP32)
    kept = hidden + (attention if model.keep_attention else 0)
    if offload:
        kept, again = 0, layer + hidden  # its input comes back
    else:
        again = layer - (attention if model.keep_attention else 0)
    stored = checkpointed * kept + (num_layers - checkpointed) * layer
    if not checkpointed:
        return stored, 0
    behind = (num_layers - 1) % model.checkpoint_every
    return stored, max(0, again - behind * layer)


def _weight_element_size(config: Config) -> int:
    """Bytes of an element of weights and hidden states."""
    return 2 if config.model.dtype == "bf16" else FP32


def layer_activation_bytes(
    sizes: ModelSizes, element_size: int, ulysses: int = 1, *, attention_size: int | None = None
) -> int:
    """Bytes that autograd keeps of one decoder layer for one token; ``attention_size``: of an
    element inside of attention, default ``element_size``."""
    a = element_size if attention_size is None else attention_size
    e, h, width = element_size, sizes.hidden_size, sizes.head_dim
    heads, kv_heads = sizes.num_heads, sizes.num_kv_heads
    norms = 2 * (FP32 * h + 2 * e * h + FP32)
    if sizes.normalizes_heads:
        norms += (heads + kv_heads) * (width * (FP32 + e) + FP32)
    # With fewer key/value heads than ranks that swap heads, each is held several times.
    held = max(kv_heads, ulysses) if ulysses > 1 else kv_heads
    attention = a * width * (2 * heads + 2 * held) + FP32 * heads
    if ulysses > 1 or a != e:
        # The output once more: back in this rank's tokens, or rounded.
        attention += e * width * heads
    return norms + attention + 4 * e * sizes.intermediate_size


def zero_options(config: Config) -> dict[str, Any]:
    """The config's own options of DeepSpeed's ``zero_optimization``."""
    options = config.deepspeed_options().get("zero_optimization", {})
    return options if isinstance(options, dict) else {}


def _offloaded(zero: dict[str, Any], what: str) -> bool:
    target = zero.get(what)
    return isinstance(target, dict) and target.get("device", "none") != "none"
