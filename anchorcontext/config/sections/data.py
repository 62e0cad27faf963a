"""``data``: from documents to packed windows."""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from anchorcontext.config.base import Section
from anchorcontext.config.sections.types import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Ratio,
    Text,
    bool_or_section,
)


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

    upsample: Annotated[UpsampleSection | None, BeforeValidator(bool_or_section)] = None
    """``true``, ``false``, or a section: keep more of the long documents than of the short ones."""

    tags: Annotated[Text | None, AfterValidator(_tag_template)] = None
    """Text in front of every document of a window, such as ``"{source}: "``; its tokens are seen
    but never predicted."""

    interleave: Annotated[InterleaveSection | None, BeforeValidator(bool_or_section)] = None
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
