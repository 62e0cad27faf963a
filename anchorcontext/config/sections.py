"""The sections of the config, one model a section, in the order of the YAML file.

Rules that concern one key stand here as types; rules between keys stand in ``rules.py``.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from anchorcontext.config.base import Section

Dtype = Literal["bf16", "fp32"]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Ratio = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]


def _folder_name(name: str) -> str:
    if name in (".", "..") or "/" in name or "\\" in name:
        raise ValueError("is the name of a folder inside run.output_dir; leave out slashes")
    return name


def _bool_or_section(value: Any) -> Any:
    """``key: true`` is a section of defaults and ``key: false`` is null."""
    if isinstance(value, bool):
        return {} if value else None
    return value


class RunSection(Section):
    """Which run this is and where it lives: the folder ``output_dir/name``."""

    name: Annotated[Text, AfterValidator(_folder_name)]
    """Name of the run; without it, the name of the config file without its ending."""

    output_dir: Text = "runs"
    """Folder that holds the runs, relative to the working directory."""

    seed: NonNegativeInt = 0
    """Seed of the initial weights and of the order of the windows."""


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


def _tag_template(template: str | None) -> str | None:
    if template is None:
        return None
    try:
        named = template.format(source="a") != template.format(source="b")
    except (LookupError, ValueError):
        named = False
    if not named:
        raise ValueError("names the source as {source}, its only field")
    return template


class SourceSection(Section):
    """One corpus; its name appears in reports."""

    name: Text
    """Name in reports; without it, the last part of ``path`` or the kind."""

    path: Text | None = None
    """File or folder, or the hub name of a data set; only ``stdlib`` needs none."""

    kind: Literal["auto", "text", "jsonl", "parquet", "datasets", "stdlib"] = "auto"
    """``text``: each file a document; ``jsonl`` (also .gz, .zst): each line an object;
    ``parquet`` (also .arrow): each row; ``datasets``: a folder of ``save_to_disk``, or what
    ``load_dataset`` opens; ``stdlib``: this Python's standard library; ``auto``: by ending."""

    pattern: Text | None = None
    """Glob for the files of a folder, such as ``**/*.md``."""

    text_field: Text = "text"
    """Field of a row that holds the document; a dot reaches into a nested one."""

    source_field: Text | None = None
    """Field of a row whose value names its source in reports and shares, as ``name/VALUE``; such as
    ``meta.redpajama_set_name``."""

    tokens_field: Text | None = None
    """Field of a row that holds token ids, for rows that are tokenised already; a field ``source``
    of spans ``{source, start, end}`` cuts a row into its documents."""

    subset: Text | None = None
    """Configuration of a data set, for ``load_dataset``."""

    split: Text = "train"
    """Split of a data set."""

    revision: Text | None = None
    """Commit or tag of a data set on the hub."""

    streaming: bool = False
    """Read a data set over the network instead of downloading it first."""

    @model_validator(mode="before")
    @classmethod
    def _default_name(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("name") is None:
            path, kind = values.get("path"), values.get("kind", "auto")
            name = PurePath(path).stem if isinstance(path, str) else ""
            return {**values, "name": name or str(kind)}
        return values


class TrainTokenizerSection(Section):
    """A byte-level BPE tokenizer trained on the sources."""

    vocab_size: Annotated[int, Field(ge=260)]
    """Entries of the vocabulary: 256 bytes, the special tokens, and merges."""


class PackingSection(Section):
    """Which documents share a window, and which are cut."""

    method: Literal["concat", "best_fit", "whole_documents"] = "concat"
    """``concat``: one stream of documents, cut where a window is full; ``best_fit``: each document
    whole in the fullest window with room for it, cut only where it is longer than a window;
    ``whole_documents``: the same, and longer ones are dropped and counted."""

    max_truncation: Ratio = 0.0
    """How often ``best_fit`` may cut documents that would fit, as a share of their number, to fill
    windows that would else stay partly empty."""

    min_fill: Ratio = 0.0
    """Windows of which a smaller share is filled are dropped and counted: 0 keeps the last one of a
    stream however short it is, 1 keeps full windows only."""


class UpsampleSection(Section):
    """Per-source length upsampling: fewer short documents, each source's share of tokens kept."""

    below: PositiveInt = 4096
    """Documents of fewer tokens are short."""

    keep: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Chance of a short document to be kept, relative to that of a long one."""


class InterleaveSection(Section):
    """Documents cut into pieces that lie scattered over their window, in their order."""

    pieces: Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)] = (2, 3)
    """The least and the most pieces of a document."""

    cut: Annotated[tuple[Ratio, Ratio], Field(strict=False)] = (0.2, 0.8)
    """Where cuts may lie, as shares of the document's length."""

    tokens: Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)] = (64, 2048)
    """Tokens of the shortest and the longest document that is cut; others are moved whole."""


class DataSection(Section):
    """From documents to packed windows."""

    path: Text
    """Folder of the prepared windows: ``prepare`` writes it, ``train`` reads it."""

    sources: Annotated[tuple[SourceSection, ...], Field(strict=False)] = ()
    """The corpora."""

    tokenizer: Text | None = None
    """Folder or hub name of a Hugging Face tokenizer; null takes the one of ``model.path``."""

    train_tokenizer: TrainTokenizerSection | None = None
    """Train a tokenizer on the sources instead."""

    workers: PositiveInt | None = None
    """Processes that tokenise; null is one for each core. The result does not depend on it."""

    max_document_characters: PositiveInt = 25_000_000
    """Longer documents are broken entries: a worker takes up to 200 bytes a character."""

    shares: Annotated[dict[Text, PositiveFloat], Field(min_length=1)] | None = None
    """Weights of the sources' tokens, by name; null keeps everything. As much is kept as the shares
    allow; ``web`` stands for ``web`` and every ``web/...``."""

    shuffle_documents: bool = False
    """Pack the documents in a random order, so that sources mix within windows; false keeps the
    order of the corpus."""

    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Chance of a document to be held out for validation, decided by a hash of its content."""

    seed: NonNegativeInt = 0
    """Seed of what ``prepare`` draws at random."""

    window_tokens: Annotated[int, Field(ge=2)]
    """Tokens of a window, the anchor included."""

    anchor: Literal["auto", "bos", "eos", "none"] | NonNegativeInt = "auto"
    """Token 0 of a window: ``bos``, ``eos``, ``none``, a token id, or ``auto`` (BOS, else EOS)."""

    anchor_copies: Literal["none", "documents", "segments"] = "none"
    """``documents``: the anchor stands in front of every document instead of once in the window;
    ``segments``: also in front of the rest of a document that was cut at a window's end. In mode
    ``intra_doc`` the copies have position 0 and compute what mode ``anchor`` does."""

    packing: PackingSection = Field(default_factory=PackingSection)
    """Which documents share a window, and which are cut."""

    upsample: Annotated[UpsampleSection | None, BeforeValidator(_bool_or_section)] = None
    """``true``, ``false``, or a section: keep more of the long documents than of the short ones."""

    tags: Annotated[Text | None, AfterValidator(_tag_template)] = None
    """Text in front of every document of a window, such as ``"{source}: "``; its tokens are seen
    but never predicted."""

    interleave: Annotated[InterleaveSection | None, BeforeValidator(_bool_or_section)] = None
    """``true``, ``false``, or a section: scatter the pieces of documents over their window."""

    min_document_tokens: PositiveInt = 1
    """Shorter documents are dropped and counted."""

    on_error: Literal["stop", "skip"] = "stop"
    """What a broken line or file does: stop the run, or be skipped and counted."""

    shuffle: bool = True
    """Visit the windows in an order drawn from the seed and the epoch."""

    max_windows: PositiveInt | None = None
    """Prepare at most this many windows; null means all."""

    add_eos: bool = True
    """End every document with the tokenizer's EOS token."""

    @property
    def shared_anchor(self) -> bool:
        """Whether a window begins with one anchor for all its documents."""
        return self.anchor != "none" and self.anchor_copies == "none"


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


class OptimizerSection(Section):
    """The optimiser; the defaults are the paper's."""

    type: Literal["adamw", "sgd"] = "adamw"
    """``adamw``, or plain ``sgd`` (which shows a wrong gradient scale that Adam would hide)."""

    lr: NonNegativeFloat = 2e-5
    """Peak learning rate."""

    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)
    """Adam's decay rates."""

    eps: PositiveFloat = 1e-8
    """Adam's denominator floor."""

    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay."""


class ScheduleSection(Section):
    """The learning rate over the steps."""

    type: Literal["constant", "cosine"] = "constant"
    """``constant``, or ``cosine`` down to ``min_lr_ratio`` at the last step."""

    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up."""

    min_lr_ratio: Ratio = 0.1
    """Last learning rate of ``cosine`` divided by ``optimizer.lr``."""


class TrainSection(Section):
    """The training loop."""

    steps: PositiveInt
    """Optimiser steps of the whole run."""

    windows_per_step: PositiveInt
    """Windows of one optimiser step over all ranks; accumulation follows from it."""

    micro_batch_windows: PositiveInt = 1
    """Windows that one SP group computes at a time."""

    clip_norm: PositiveFloat | None = 1.0
    """Largest global gradient norm; null does not clip."""

    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    """DeepSpeed ZeRO stage: 1 shards optimiser state, 2 also gradients, 3 also parameters."""

    partitioned_init: bool = False
    """ZeRO-3: rank 0 alone loads the model, on its host, and hands each rank its part parameter by
    parameter; false loads it on every rank."""

    offload_optimizer: Literal["none", "cpu"] = "none"
    """``cpu``: master weights and optimiser state stay in the host's memory, and are updated there;
    from ``zero_stage`` 1 on."""

    deterministic: bool = False
    """Only operators that give the same bits in every run; on CPUs they always do, on GPUs it may
    cost time, and an operator without such a form is an error."""

    log_every: PositiveInt = 1
    """Steps between two lines of metrics."""


class SnapshotsSection(Section):
    """The checkpoints at the end whose scores are averaged; the defaults are the paper's."""

    last: PositiveInt = 5
    """Number of checkpoints."""

    apart: PositiveInt = 10
    """Steps between two of them; the last one is that of the last step."""


class CheckpointSection(Section):
    """When checkpoints are written and which are kept."""

    every: PositiveInt | None = None
    """Steps between checkpoints; null writes none but those that other keys here ask for."""

    keep: PositiveInt = 2
    """Newest checkpoints kept."""

    keep_every: PositiveInt | None = None
    """Steps between checkpoints that are kept for good; null keeps none."""

    snapshots: SnapshotsSection | None = None
    """Checkpoints at equal distances up to the last step, kept for good: ``{last: 5, apart: 10}``;
    null keeps none."""

    final: bool = True
    """Write one after the last step."""

    background: bool = False
    """Write in a thread while training goes on, from a copy of the state in the host's memory."""

    failures: PositiveInt = 3
    """Saves that fail in a row (a full disk) before the run stops; a final one stops it at once."""


class SpikeSection(Section):
    """A value that jumps over what it was."""

    factor: Annotated[float, Field(gt=1)]
    """Times the median of the recent steps."""

    action: Literal["log", "skip", "stop"] = "log"
    """``log`` it; ``skip`` the step, so that it is not applied; ``stop`` the run."""


class GuardsSection(Section):
    """What happens when a step goes wrong. What the step was made of goes to ``RUN/guards``."""

    max_skipped: PositiveInt = 3
    """Steps in a row with a loss or gradient that is not finite before the run stops; such a step
    is never applied."""

    loss_spike: SpikeSection | None = None
    """A loss far above the recent ones; null does not look."""

    gradient_spike: SpikeSection | None = None
    """A gradient norm, before clipping, far above the recent ones; null does not look."""

    recent: PositiveInt = 50
    """Steps whose median a spike is measured by."""

    slow_step: Annotated[float, Field(gt=1)] | None = 10.0
    """Write the stacks of all threads when a step takes this times the median step, and 20 s; null
    never does."""


class ParitySection(Section):
    """The distributed run against a single device."""

    at_start: bool = True
    """Check the logits before the first step."""

    at_end: bool = True
    """Check the logits after the last step."""

    every: PositiveInt | None = None
    """Steps between checks on the live weights; null checks at start and end only."""

    stock_tokens: PositiveInt = 2048
    """Tokens of the windows that are compared with stock transformers and its dense mask."""

    logits: PositiveFloat | None = None
    """Largest logit difference allowed, times the largest logit where that exceeds 1; null takes
    the default of the dtype."""

    loss: PositiveFloat | None = None
    """Largest relative loss difference allowed; null takes the default of the dtype."""

    gradient: PositiveFloat | None = None
    """Largest relative gradient difference allowed; null takes the default of the dtype."""


class WandbSection(Section):
    """A Weights & Biases run; without a network or a key it is written offline."""

    project: Text = "anchorcontext"
    """Project name."""

    entity: Text | None = None
    """Team or user; null is the account's default."""

    mode: Literal["auto", "online", "offline"] = "auto"
    """``auto``: online when a key is set, else offline."""


class ProfileSection(Section):
    """Steps whose every operator and kernel is recorded: a Chrome trace in the run's folder."""

    first: PositiveInt = Field(alias="from")
    """The first step recorded; steps count from 1, and the first ones are warm-up."""

    steps: PositiveInt = 3
    """Steps recorded; a trace grows by tens of megabytes a step."""

    ranks: Literal["first", "all"] = "first"
    """``first``: rank 0 alone; ``all``: one trace a rank."""


class WatchSection(Section):
    """What is shown and recorded while training."""

    progress: bool = True
    """Show a progress bar on rank 0."""

    wandb: Annotated[WandbSection | None, BeforeValidator(_bool_or_section)] = None
    """``true``, ``false``, or a section; after loading a section or null."""

    tensorboard: bool = False
    """Write TensorBoard events into the run's folder."""

    profile: ProfileSection | None = None
    """``{from: 10, steps: 3}`` profiles steps 10 to 12; null never starts the profiler."""

    peak_flops: PositiveFloat | None = None
    """Peak FLOP/s of one device in the model's dtype; MFU needs it."""
