"""Tokenising: ``prepare``'s first stage against ``datasets.map``, on the same texts.

Both read the same JSON lines and leave token ids on disk, memory-mapped; both use the same fast
tokenizer. Ours does more on the way: names, content hashes, problems, progress that survives a
kill. Each contender tokenises the whole corpus in each repeat, in turn; the fastest repeat counts.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.encode import Encoder
from ..data.sources import RowReader, StandardLibrary, read_documents
from ..data.sources.documents import ProblemLog
from ..data.sources.jsonl import JsonLines
from ..data.tokenise import tokenise
from ..data.tokenizer import train_tokenizer
from ..errors import UserError
from ..markdown import markdown_table
from ..words import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VOCABULARY = 8192
BASELINE = "datasets.map, 1 process"
HEADERS = ("", "seconds", "tokens/s", "of datasets.map")


@dataclass(frozen=True)
class DataResult:
    """One contender: the fastest repeat."""

    contender: str
    seconds: float
    tokens: int
    over_baseline: float
    """Tokens per second over those of the baseline."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def bench_data(
    megabytes: int, workers: int, repeats: int, tokenizer: PreTrainedTokenizerBase | None = None
) -> list[DataResult]:
    """Tokenise ``megabytes`` of the standard library's texts, repeated as often as needed.

    Args:
        megabytes: 10^6 bytes of JSON lines.
        workers: processes of the contender that uses several.
        repeats: each contender's runs.
        tokenizer: None trains a byte-level BPE of 8,192 entries on the texts.

    Raises:
        UserError: the package datasets is not installed; contenders disagree about the tokens.
    """
    texts = [document.text for document in read_documents([StandardLibrary("")], ProblemLog())]
    tokenizer = train_tokenizer(texts, VOCABULARY) if tokenizer is None else tokenizer
    seconds: dict[str, list[float]] = {}
    tokens: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="anchorcontext-bench-") as folder, _one_thread():
        corpus = Path(folder, "corpus.jsonl")
        _write(corpus, texts, megabytes * 10**6)
        contenders = _contenders(corpus, tokenizer, workers)
        for repeat in range(repeats):
            for number, (name, run) in enumerate(contenders.items()):
                place = Path(folder, f"{repeat}-{number}")
                place.mkdir()
                start = time.perf_counter()
                tokens[name] = run(place)
                seconds.setdefault(name, []).append(time.perf_counter() - start)
    if len(set(tokens.values())) > 1:
        raise UserError(f"the contenders found different numbers of tokens: {tokens}")
    return [
        DataResult(name, min(mine), tokens[name], min(seconds[BASELINE]) / min(mine))
        for name, mine in seconds.items()
    ]


def data_markdown(results: list[DataResult], setting: str, line: str) -> str:
    """The section of ``docs/benchmarks.md``."""
    return "\n\n".join(
        [
            "## Tokenising",
            f"Written by `{line}`. {setting}",
            markdown_table(HEADERS, table_rows(results)),
        ]
    )


def table_rows(results: list[DataResult]) -> list[tuple[str, str, str, str]]:
    """Cells of ``HEADERS``."""
    return [
        (
            result.contender,
            f"{result.seconds:.1f}",
            f"{result.tokens_per_second:,.0f}",
            f"{result.over_baseline:.2f} x",
        )
        for result in results
    ]


def _contenders(
    corpus: Path, tokenizer: PreTrainedTokenizerBase, workers: int
) -> dict[str, Callable[[Path], int]]:
    def ours(count: int) -> Callable[[Path], int]:
        return lambda place: _prepare(corpus, tokenizer, count, place)

    return {
        BASELINE: lambda place: _map(corpus, tokenizer, place),
        **{f"prepare, {counted(count, 'worker')}": ours(count) for count in (1, workers)},
    }


def _map(corpus: Path, tokenizer: Any, place: Path) -> int:
    """What a script without this package does: load, map in batches, keep the ids."""
    try:
        import datasets
    except ImportError:
        raise UserError("bench data compares with datasets; install anchorcontext[hub]") from None
    datasets.disable_progress_bars()
    rows = datasets.load_dataset(
        "json", data_files=str(corpus), split="train", cache_dir=str(place)
    )

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": tokenizer(batch["text"], add_special_tokens=False)["input_ids"]}

    done = rows.map(encode, batched=True, remove_columns=["text"])
    return sum(len(column) for batch in done.with_format("arrow").iter(1000) for column in batch[0])


def _prepare(corpus: Path, tokenizer: Any, workers: int, place: Path) -> int:
    source = JsonLines(RowReader("corpus"), corpus, [corpus])
    encoder = Encoder(tokenizer, None, add_eos=False)
    progress, _ = tokenise(
        [source],
        encoder,
        place,
        on_error="stop",
        workers=workers,
        report=lambda stage, done, total: None,
        small_bytes=0,
    )
    return progress.tokens


def _write(path: Path, texts: list[str], num_bytes: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for text in cycle(texts):
            file.write(json.dumps({"text": text}) + "\n")
            if file.tell() >= num_bytes:
                return


@contextmanager
def _one_thread() -> Iterator[None]:
    """The tokenizer's own threads off, so that a process is a core."""
    key = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(key)
    os.environ[key] = "false"
    try:
        yield
    finally:
        os.environ.pop(key)
        if before is not None:
            os.environ[key] = before
