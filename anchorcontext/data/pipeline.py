"""``prepare``: sources -> documents -> token ids -> windows in one folder, with an account.

Every token that goes in is kept or dropped for a named reason. Memory stays bounded: tokens go
through a file, packing sees lengths only, windows are written one batch after the other.
"""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UserError
from .packing import Dropped, Packing, pack
from .report import PrepareReport
from .sources import MAX_EXAMPLES, Document, ProblemLog, Source, open_sources, read_documents
from .store import (
    ANCHOR_DOCUMENT,
    PROBLEMS,
    TOKENIZER,
    Builder,
    WindowRecord,
    build_folder,
    check_replaceable,
    read_meta,
)
from .tokenizer import (
    Encoder,
    check_vocabulary,
    load_tokenizer,
    resolve_anchor,
    tokenizer_digest,
    train_tokenizer,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..config import Config
    from ..config.sections import DataSection, ModelSection

PACKING = "concat"
RENDERED_ANCHOR = "rendered_anchor"
# One call of the tokenizer: enough documents for all its threads, a few hundred MB with encodings.
BATCH_CHARACTERS, BATCH_DOCUMENTS = 1 << 22, 4096
QUANTILES = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}

Progress = Callable[[str, int, int | None], None]
"""Called with (stage, done, total): characters or windows; total None where it is not known."""


def prepare(
    config: Config, *, force: bool = False, progress: Progress | None = None
) -> PrepareReport:
    """Build ``config.data.path``, or find that it already holds exactly this.

    Raises:
        UserError: the corpus, the tokenizer or the options cannot be used as they are; the folder
            holds windows that were made differently and ``force`` is false.
    """
    data = config.data
    path = Path(data.path).expanduser()
    check_replaceable(path)
    sources = open_sources(data.sources)
    tokenizer = None if data.train_tokenizer else load_tokenizer(_tokenizer_folder(config))
    model_size = model_vocab_size(config.model)
    if tokenizer is not None:
        check_vocabulary(len(tokenizer), model_size)
    request = _request(data, sources, tokenizer)
    meta = None if force else read_meta(path)
    if meta is not None:
        _check_same(path, meta["request"], request)
        check_vocabulary(meta["vocab_size"], model_size)
        return PrepareReport.from_meta(path, meta)
    run = _Run(data, sources, progress or (lambda stage, done, total: None))
    with _name_full_disk(path), build_folder(path) as builder:
        meta = run.build(builder, tokenizer, model_size, request)
    return replace(PrepareReport.from_meta(path, meta), reused=False)


def model_vocab_size(model: ModelSection) -> int | None:
    """The configured model's vocabulary, where that is known without loading it."""
    if model.scratch is not None:
        size = model.scratch.get("vocab_size")
        return int(size) if size is not None else None
    file = Path(model.path or "").expanduser() / "config.json"
    if not file.is_file():
        return None
    settings = json.loads(file.read_text(encoding="utf-8"))
    size = settings.get("text_config", settings).get("vocab_size")
    return int(size) if size is not None else None


def _tokenizer_folder(config: Config) -> str:
    folder = config.data.tokenizer or config.model.path
    if folder is None:
        raise UserError(
            "no tokenizer: set data.tokenizer to a tokenizer's folder, or "
            "data.train_tokenizer.vocab_size to train one"
        )
    return folder


def _request(
    data: DataSection, sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, Any]:
    """Everything that decides what the folder holds; equal requests give equal windows."""
    if tokenizer is not None:
        made_with: Any = tokenizer_digest(tokenizer)
    else:
        assert data.train_tokenizer is not None
        made_with = {"train_vocab_size": data.train_tokenizer.vocab_size}
    entries = [
        {
            "name": entry.name,
            "kind": entry.kind,
            "pattern": entry.pattern,
            "text_field": entry.text_field,
            **source.digest(),
        }
        for entry, source in zip(data.sources, sources, strict=True)
    ]
    return {
        "sources": entries,
        "tokenizer": made_with,
        "packing": PACKING,
        "window_tokens": data.window_tokens,
        "anchor": data.anchor,
        "add_eos": data.add_eos,
        "min_document_tokens": data.min_document_tokens,
        "max_windows": data.max_windows,
        "on_error": data.on_error,
    }


def _check_same(path: Path, made: dict[str, Any], asked: dict[str, Any]) -> None:
    different = [
        f"  {key}: was {made.get(key)}, now {asked.get(key)}"
        for key in {**made, **asked}
        if made.get(key) != asked.get(key)
    ]
    if different:
        raise UserError(
            f"data.path = {str(path)!r} holds windows that were made differently:\n"
            + "\n".join(different)
            + "\nprepare with --force to replace them, or choose another data.path"
        )


@contextmanager
def _name_full_disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise UserError(
            f"no space left on the disk of {path}: prepare needs about 8 bytes a token while it "
            "runs, and half of that afterwards; nothing was left behind"
        ) from error


@dataclass
class _Run:
    """One build: the stages in order, and what they measured."""

    data: DataSection
    sources: Sequence[Source]
    progress: Progress
    log: ProblemLog = field(init=False)
    source_names: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def build(
        self,
        builder: Builder,
        tokenizer: PreTrainedTokenizerBase | None,
        model_size: int | None,
        request: dict[str, Any],
    ) -> dict[str, Any]:
        """Fill ``builder``; returns the meta data."""
        if tokenizer is None:
            tokenizer = self._train_tokenizer()
            check_vocabulary(len(tokenizer), model_size)
        anchor_id = resolve_anchor(tokenizer, self.data.anchor)
        encoder = Encoder(tokenizer, anchor_id, self.data.add_eos)
        tokens_file = builder.folder / "tokens.bin"
        lengths, source_of = self._tokenise(encoder, builder, tokens_file)
        with self._timed("pack"):
            packing = pack(
                lengths,
                self.data.window_tokens,
                anchor=anchor_id is not None,
                method=PACKING,
                min_document_tokens=self.data.min_document_tokens,
                max_windows=self.data.max_windows,
            )
        if packing.num_windows == 0:
            raise UserError(
                f"the corpus gives no window: none of its {len(lengths)} documents has "
                f"data.min_document_tokens = {self.data.min_document_tokens} tokens"
            )
        self._write_windows(builder, packing, lengths, anchor_id, tokens_file)
        tokens_file.unlink()
        tokenizer.save_pretrained(builder.folder / TOKENIZER)
        with (builder.folder / PROBLEMS).open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(problem)) + "\n" for problem in self.log.problems)
        return builder.write_meta(
            {
                "num_documents": len(lengths),
                "window_tokens": self.data.window_tokens,
                "anchor_id": anchor_id,
                "vocab_size": len(tokenizer),
                "request": request,
                "report": self._account(packing, lengths, source_of, encoder),
            }
        )

    def _train_tokenizer(self) -> PreTrainedTokenizerBase:
        assert self.data.train_tokenizer is not None
        with self._timed("train_tokenizer"):
            documents = self._documents("read for tokenizer")
            texts = (document.text for document in documents)
            return train_tokenizer(texts, self.data.train_tokenizer.vocab_size)

    def _documents(self, stage: str) -> Iterator[Document]:
        """All documents once more, from the first, with progress; starts a new problem log."""
        self.log = ProblemLog(self.data.on_error)
        files = [path for source in self.sources for path in source.files()]
        total = None
        if not any(path.name.endswith(".gz") for path in files):
            total = sum(path.stat().st_size for path in files if path.exists())
        done = 0
        for document in read_documents(self.sources, self.log):
            yield document
            done += len(document.text)
            self.progress(stage, done, total)
        self.progress(stage, done, done)

    def _tokenise(
        self, encoder: Encoder, builder: Builder, tokens_file: Path
    ) -> tuple[np.ndarray, np.ndarray]:
        """Write token ids (int32, one document after the other) and the documents table.

        Returns each document's number of tokens, int64 (D,), and its source's index, int32 (D,).
        """
        lengths: list[np.ndarray] = []
        source_of: list[np.ndarray] = []
        index: dict[str, int] = {}

        def rows() -> Iterator[tuple[list[str], list[str], np.ndarray]]:
            for batch in _batches(self._documents("tokenise")):
                ids = encoder.encode([document.text for document in batch])
                np.concatenate(ids).tofile(file)
                names = [document.source for document in batch]
                lengths.append(np.array([len(part) for part in ids], dtype=np.int64))
                numbers = [index.setdefault(name, len(index)) for name in names]
                source_of.append(np.array(numbers, dtype=np.int32))
                yield names, [document.name for document in batch], lengths[-1]

        with self._timed("tokenise"), tokens_file.open("wb") as file:
            builder.write_documents(rows())
        self.source_names = list(index)
        if not lengths:
            raise UserError(
                f"data.sources hold no document ({len(self.log.problems)} entries were skipped)"
            )
        return np.concatenate(lengths), np.concatenate(source_of)

    def _write_windows(
        self,
        builder: Builder,
        packing: Packing,
        lengths: np.ndarray,
        anchor_id: int | None,
        tokens_file: Path,
    ) -> None:
        tokens = np.memmap(tokens_file, dtype=np.int32, mode="r")
        first_token = np.cumsum(lengths) - lengths

        def records() -> Iterator[WindowRecord]:
            for window in range(packing.num_windows):
                yield _assemble(packing, window, tokens, first_token, anchor_id)
                self.progress("write windows", window + 1, packing.num_windows)

        with self._timed("write"):
            builder.write_windows(records())

    def _account(
        self, packing: Packing, lengths: np.ndarray, source_of: np.ndarray, encoder: Encoder
    ) -> dict[str, Any]:
        segments, count = packing.segments, len(self.source_names)
        rendered = encoder.num_rendered_anchors
        kept = np.bincount(source_of[segments.documents], segments.lengths, count)
        tokens = np.bincount(source_of, lengths, count)
        documents = np.bincount(source_of, minlength=count)
        pieces = np.bincount(segments.documents, minlength=len(lengths))
        dropped = {reason: _drop_report(part) for reason, part in packing.dropped.items()}
        if rendered:
            dropped[RENDERED_ANCHOR] = {"documents": rendered, "tokens": rendered}
        quantiles = np.quantile(lengths, list(QUANTILES.values()), method="nearest")
        return {
            "utilisation": packing.utilisation,
            "documents_cut": int((pieces > 1).sum()),
            "tokens_in": int(lengths.sum()) + rendered,
            "tokens_kept": packing.num_kept,
            "dropped": dropped,
            "eos_added": encoder.num_eos_added,
            "problems": self.log.counts,
            "problem_examples": [str(problem) for problem in self.log.problems[:MAX_EXAMPLES]],
            "sources": {
                name: {
                    "documents": int(documents[i]),
                    "tokens": int(tokens[i]),
                    "kept": int(kept[i]),
                }
                for i, name in enumerate(self.source_names)
            },
            "document_tokens": dict(zip(QUANTILES, map(int, quantiles), strict=True)),
            "seconds": {stage: round(value, 3) for stage, value in self.seconds.items()},
        }

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - start


def _assemble(
    packing: Packing,
    window: int,
    tokens: np.ndarray,
    first_token: np.ndarray,
    anchor_id: int | None,
) -> WindowRecord:
    """The tokens of one window, from all documents' ``tokens`` and each one's ``first_token``."""
    segments = packing.segments
    rows = slice(segments.offsets[window], segments.offsets[window + 1])
    documents, starts, lengths = (
        array[rows] for array in (segments.documents, segments.starts, segments.lengths)
    )
    begins = first_token[documents] + starts
    parts = [tokens[begin : begin + length] for begin, length in zip(begins, lengths, strict=True)]
    if anchor_id is not None:
        parts.insert(0, np.array([anchor_id], dtype=np.int32))
        documents, starts, lengths = (
            np.r_[first, array]
            for first, array in ((ANCHOR_DOCUMENT, documents), (0, starts), (1, lengths))
        )
    return WindowRecord(np.concatenate(parts), np.r_[0, np.cumsum(lengths)], documents, starts)


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _drop_report(part: Dropped) -> dict[str, int]:
    return {"documents": part.num_documents, "tokens": part.num_tokens}
