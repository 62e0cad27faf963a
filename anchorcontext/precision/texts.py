"""Token sequences to measure on, from real documents.

Every text is BOS (EOS for a tokenizer without BOS) at position 0, followed by the next ``length`` -
1 tokens of one domain: the domain's documents one after the other, without anything between them,
cut into consecutive pieces. No token is used twice, and no other BOS appears. Texts take the
domains in turn; a domain that is used up is passed over. Shorter texts are the beginnings of longer
ones, so every length is measured on the same words.

Without a source: Python's standard library, prose (``pydoc_data.topics``) and code.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..config.sections import SourceSection
from ..data.sources import Document, ProblemLog, Source, open_source, read_documents
from ..data.tokenizer import load_tokenizer, resolve_anchor, tokenizer_digest
from ..errors import UserError
from ..words import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Shuffling needs the documents at hand; a corpus larger than this is shuffled in its beginning.
MOST_DOCUMENTS = 20_000


@dataclass(frozen=True)
class Text:
    """One sequence: its number, its domain, its first document, and ids int64 (length,)."""

    number: int
    domain: str
    document: str
    ids: torch.Tensor

    @property
    def digest(self) -> str:
        """A fingerprint of the ids."""
        return hashlib.blake2b(self.ids.numpy().tobytes(), digest_size=8).hexdigest()


def read_texts(
    tokenizer_path: str, count: int, length: int, *, source: str | None = None, seed: int = 0
) -> list[Text]:
    """The first ``count`` texts of ``length`` tokens; more texts leave the first ones as they are.

    Args:
        tokenizer_path: model folder, or a folder with a tokenizer.
        source: file or folder of text, JSONL or Parquet files; None: the standard library.
        seed: of the order of documents within a domain.

    Raises:
        UserError: no tokenizer or no source there; not enough tokens, with what there is.
    """
    tokenizer = load_tokenizer(tokenizer_path)
    bos = resolve_anchor(tokenizer, "auto")
    assert bos is not None
    domains = _documents(source, seed)
    streams = {
        name: _pieces(tokenizer, documents, length - 1) for name, documents in domains.items()
    }
    texts: list[Text] = []
    while streams and len(texts) < count:
        for name in list(streams):
            piece = next(streams[name], None)
            if piece is None:
                del streams[name]
            elif len(texts) < count:
                document, ids = piece
                texts.append(Text(len(texts), name, document, torch.tensor([bos, *ids])))
    if len(texts) < count:
        raise UserError(_too_few(tokenizer, domains, texts, count, length, source))
    return texts


def corpus_digest(tokenizer_path: str, source: str | None) -> dict[str, Any]:
    """What texts are made of: it changes when the source's files or the tokenizer may have.

    Raises:
        UserError: no tokenizer or no source there.
    """
    tokenizer = tokenizer_digest(load_tokenizer(tokenizer_path))
    return {"source": source, **_open(source).digest(), "tokenizer": tokenizer}


def _open(source: str | None) -> Source:
    section = SourceSection(
        name="stdlib" if source is None else Path(source).name.split(".")[0],
        path=source,
        kind="stdlib" if source is None else "auto",
    )
    return open_source(section, "--source")


def _documents(source: str | None, seed: int) -> dict[str, list[Document]]:
    """The documents of each domain, shuffled."""
    opened = _open(source)
    domains: dict[str, list[Document]] = {}
    for document in islice(read_documents([opened], ProblemLog("skip")), MOST_DOCUMENTS):
        domains.setdefault(document.source.removeprefix("stdlib/"), []).append(document)
    if not domains:
        raise UserError(f"--source {source}: no document in it; give files with text")
    for documents in domains.values():
        random.Random(seed).shuffle(documents)
    return dict(sorted(domains.items(), key=lambda item: item[0] == "code"))


def _pieces(
    tokenizer: PreTrainedTokenizerBase, documents: list[Document], size: int
) -> Iterator[tuple[str, list[int]]]:
    """Consecutive pieces of ``size`` tokens, each with the name of the document it begins in."""
    rest: list[int] = []
    name = ""
    for document in documents:
        name = name if rest else document.name
        rest += _encode(tokenizer, document)
        start = 0
        while len(rest) - start >= size:
            yield name, rest[start : start + size]
            start, name = start + size, document.name
        rest = rest[start:]


def _encode(tokenizer: PreTrainedTokenizerBase, document: Document) -> list[int]:
    if document.ids is not None:
        return [int(token) for token in document.ids]
    # Tokenizers warn about texts longer than the model; they are cut afterwards.
    ids: list[int] = tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _too_few(
    tokenizer: PreTrainedTokenizerBase,
    domains: dict[str, list[Document]],
    texts: list[Text],
    count: int,
    length: int,
    source: str | None,
) -> str:
    parts = []
    for name, documents in domains.items():
        tokens = sum(len(_encode(tokenizer, document)) for document in documents)
        made = sum(text.domain == name for text in texts)
        has = f"{name} has {counted(len(documents), 'document')} of {counted(tokens, 'token')}"
        parts.append(f"{has}: {counted(made, 'text')}")
    where = "the standard library" if source is None else str(Path(source))
    return (
        f"{counted(count, 'text')} of {length:,} tokens: {where} gives {len(texts)} "
        f"({'; '.join(parts)}); ask for fewer (--texts) or shorter ones (--tokens, "
        "--lengths), or give more with --source"
    )
