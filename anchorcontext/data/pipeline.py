"""``prepare``: sources -> documents -> token ids -> windows in one folder, with an account.

Every token that goes in is kept or dropped for a named reason. Memory stays bounded: tokens go
through files, packing sees lengths only, windows are written one batch after the other.
"""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UserError
from ..words import counted
from .account import account
from .arrange import arrange
from .assemble import window_records
from .builder import Builder, build_folder, check_replaceable
from .encode import Encoder
from .fronts import Fronts, tag_ids
from .mixture import held_out, keep_shares, shuffled
from .packing import Packing
from .report import PrepareReport
from .request import (
    check_apart,
    check_same,
    model_vocab_size,
    tokenizer_folder,
    tokens_request,
    windows_request,
)
from .sources import ProblemLog, Source, open_sources, read_documents
from .sources.documents import MAX_EXAMPLES
from .store import PROBLEMS, TOKENIZER, TRAIN, VALIDATION, WindowRecord, check_files, read_meta
from .tokenise import Report, tokenise
from .tokenizer import (
    check_vocabulary,
    load_tokenizer,
    resolve_anchor,
    train_tokenizer,
)
from .tokens import TokenisedCorpus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..config import Config
    from ..config.sections import DataSection


def prepare(
    config: Config, *, force: bool = False, progress: Report | None = None
) -> PrepareReport:
    """Build ``config.data.path``, or find that it already holds exactly this.

    A run that was ended goes on where it was: tokenised parts of the same sources and tokenizer
    are kept, and the folder comes out the same to the byte.

    Raises:
        UserError: the corpus, the tokenizer or the options cannot be used as they are; the folder
            holds windows that were made differently and ``force`` is false.
    """
    data = config.data
    path = Path(data.path).expanduser()
    check_replaceable(path)
    check_apart(path, data.sources)
    sources = open_sources(data.sources)
    tokenizer = None if data.train_tokenizer else load_tokenizer(tokenizer_folder(config))
    model_size = model_vocab_size(config.model)
    if tokenizer is not None:
        check_vocabulary(len(tokenizer), model_size)
    for_tokens = tokens_request(data, sources, tokenizer)
    request = {**for_tokens, **windows_request(data)}
    meta = None if force else read_meta(path)
    if meta is not None:
        check_same(path, meta["request"], request)
        check_vocabulary(meta["vocab_size"], model_size)
        check_files(path)
        return PrepareReport.from_meta(path, meta)
    with _name_full_disk(path), build_folder(path, for_tokens) as builder:
        run = _Run(data, sources, builder, progress or (lambda stage, done, total: None))
        meta = run.build(tokenizer, model_size, request)
    return replace(PrepareReport.from_meta(path, meta), reused=False)


@contextmanager
def _name_full_disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise UserError(
            f"no space left on the disk of {path}: prepare needs about 8 bytes a token while it "
            "runs, and half of that afterwards; free some and run it again: it continues with "
            f"what is complete in {path}.incomplete"
        ) from error


@dataclass
class _Run:
    """One build: the stages in order, and what they measured."""

    data: DataSection
    sources: Sequence[Source]
    builder: Builder
    report: Report
    seconds: dict[str, float] = field(default_factory=dict)

    def build(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        model_size: int | None,
        request: dict[str, Any],
    ) -> dict[str, Any]:
        """Fill the folder; returns the meta data."""
        data, builder = self.data, self.builder
        if tokenizer is None:
            tokenizer = self._trained_tokenizer()
            check_vocabulary(len(tokenizer), model_size)
        anchor_id = resolve_anchor(tokenizer, data.anchor)
        encoder = Encoder(tokenizer, anchor_id, data.add_eos, data.max_document_characters)
        with self._timed("tokenise"):
            progress, log = tokenise(
                self.sources,
                encoder,
                builder.work,
                on_error=data.on_error,
                workers=data.workers,
                report=self.report,
            )
        corpus = TokenisedCorpus(builder.work)
        if not len(corpus.lengths):
            skipped = "".join(f"\n  {problem}" for problem in log.problems[:MAX_EXAMPLES])
            raise UserError(
                "data.sources hold no document; skipped: "
                f"{counted(len(log.problems), 'entry', 'entries')}{skipped}"
            )
        with self._timed("pack"):
            chosen, left_out = self._choose(corpus)
            fronts = Fronts(data.anchor_copies, tag_ids(tokenizer, data.tags, corpus.source_names))
            packings = {split: self._pack(corpus, chosen[split], split, fronts) for split in chosen}
        with self._timed("write"):
            builder.write_documents(corpus.rows())
            for split, packing in packings.items():
                records = window_records(packing, chosen[split], corpus, anchor_id, fronts)
                builder.write_windows(self._counted(records, split, packing), split)
        tokenizer.save_pretrained(builder.folder / TOKENIZER)
        with (builder.folder / PROBLEMS).open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(problem)) + "\n" for problem in log.problems)
        found = account(corpus, progress, log, chosen, packings, left_out)
        found["seconds"] = {stage: round(value, 3) for stage, value in self.seconds.items()}
        return builder.write_meta(
            {
                "num_documents": len(corpus.lengths),
                "window_tokens": data.window_tokens,
                "anchor_id": anchor_id,
                "vocab_size": len(tokenizer),
                "request": request,
                "report": found,
            }
        )

    def _trained_tokenizer(self) -> PreTrainedTokenizerBase:
        """A new tokenizer, or the one that an earlier run trained; as it is loaded from disk."""
        assert self.data.train_tokenizer is not None
        folder = self.builder.work / TOKENIZER
        if folder.is_dir():
            return load_tokenizer(folder)
        log = ProblemLog(self.data.on_error)
        with self._timed("train_tokenizer"):
            texts = self._texts(log)
            tokenizer = train_tokenizer(texts, self.data.train_tokenizer.vocab_size)
        beside = folder.with_name(f"{TOKENIZER}.part")
        tokenizer.save_pretrained(beside)
        beside.rename(folder)
        return load_tokenizer(folder)

    def _texts(self, log: ProblemLog) -> Iterator[str]:
        count = 0
        for count, document in enumerate(read_documents(self.sources, log), start=1):
            yield document.text
            self.report("read for tokenizer", count, None)
        self.report("read for tokenizer", count, count)

    def _choose(
        self, corpus: TokenisedCorpus
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The documents of each split in the order of packing, and those left out, by reason."""
        data = self.data
        order = np.arange(len(corpus.lengths))
        left_out: dict[str, np.ndarray] = {}
        if data.shuffle_documents:
            order = shuffled(corpus.hashes, data.seed)
        if data.shares is not None:
            keep = keep_shares(
                corpus.lengths,
                corpus.sources,
                corpus.source_names,
                data.shares,
                corpus.hashes,
                data.seed,
            )
            left_out["shares"] = np.flatnonzero(~keep)
            order = order[keep[order]]
        if not data.validation_fraction:
            return {TRAIN: order}, left_out
        apart = held_out(corpus.hashes, data.validation_fraction)[order]
        if not apart.any():
            raise UserError(
                f"data.validation_fraction = {data.validation_fraction}: holds out none of "
                f"{counted(len(order), 'document')}; raise it, or set it to 0"
            )
        return {TRAIN: order[~apart], VALIDATION: order[apart]}, left_out

    def _pack(
        self, corpus: TokenisedCorpus, documents: np.ndarray, split: str, fronts: Fronts
    ) -> Packing:
        lengths, sources = corpus.lengths[documents], corpus.sources[documents]
        hashes, apart = corpus.hashes[documents], split != TRAIN
        packing = arrange(self.data, lengths, sources, hashes, fronts, held_out=apart)
        if packing.num_windows == 0:
            reasons = ", ".join(
                f"{reason} dropped {part.num_documents}" for reason, part in packing.dropped.items()
            )
            raise UserError(
                f"the corpus gives no window ({split}): none of its "
                f"{counted(len(documents), 'document')} is left, {reasons}; change these "
                "options of data"
            )
        return packing

    def _counted(
        self, records: Iterator[WindowRecord], split: str, packing: Packing
    ) -> Iterator[WindowRecord]:
        for number, record in enumerate(records, start=1):
            yield record
            self.report(f"write {split}", number, packing.num_windows)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - start
