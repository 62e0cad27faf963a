"""The corpus to tokenised parts, continuing where an earlier run was ended."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

from .encode import CHUNKS_PER_WORKER, EncodedChunk, Encoder, encode_chunks
from .sources import Chunk, Document, Position, Problem, ProblemLog, Source, sift
from .sources.opening import CHUNK_BYTES, read_chunks
from .tokens import PART_TOKENS, PartWriter, Progress, complete_parts

# Starting processes takes longer: each imports this package and the tokenizer.
SMALL_BYTES = 1 << 24

Report = Callable[[str, int, int | None], None]
"""Called with (stage, done, total): bytes, documents or windows; total None where unknown."""


def tokenise(
    sources: Sequence[Source],
    encoder: Encoder,
    folder: Path,
    *,
    on_error: str,
    workers: int | None,
    report: Report,
    chunk_bytes: int = CHUNK_BYTES,
    part_tokens: int = PART_TOKENS,
    small_bytes: int = SMALL_BYTES,
) -> tuple[Progress, ProblemLog]:
    """Write the parts of ``folder`` that are missing.

    The documents, their order and their tokens depend on the corpus and the encoder alone: not on
    ``workers`` (None: one a core), nor on kills in between. A corpus of less than ``small_bytes``
    is tokenised in this process.

    Raises:
        UserError: an entry is no document and ``on_error`` is ``"stop"``; a worker was ended.
    """
    writer = PartWriter(folder, part_tokens)
    log = ProblemLog(on_error)
    log.problems += [problem for _, problems in complete_parts(folder) for problem in problems]
    known = [source.num_bytes for source in sources]
    total = None if None in known else sum(size or 0 for size in known)
    if not writer.progress.complete:
        report("tokenise", writer.progress.size, total)
        positions: deque[Position] = deque()
        chunks = _noting(read_chunks(sources, writer.progress.after, chunk_bytes), positions)
        small = total is not None and total < small_bytes
        results = encode_chunks(encoder, chunks, 1 if small else workers or usable_cores())
        for result in results:
            if result.problems:
                _note(result, results, log)
            writer.add(result, positions.popleft())
            report("tokenise", writer.progress.size, total)
        writer.finish()
    report("tokenise", writer.progress.size, writer.progress.size)
    return writer.progress, log


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _noting(
    chunks: Iterator[tuple[Position, Chunk]], positions: deque[Position]
) -> Iterator[Chunk]:
    for position, chunk in chunks:
        positions.append(position)
        yield chunk


def _note(result: EncodedChunk, rest: Iterator[EncodedChunk], log: ProblemLog) -> None:
    """Problems to the log; where they stop the run, with some of those that follow."""
    items: Iterator[Document | Problem] = iter(result.problems)
    if log.on_error == "stop":
        following = islice(rest, CHUNKS_PER_WORKER)
        items = chain(items, (problem for other in following for problem in other.problems))
    for _ in sift(items, log):
        raise AssertionError("problems are no documents")
