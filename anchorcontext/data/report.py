"""The account that ``prepare`` gives: what went in, what was kept, what was dropped and why."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .store import TRAIN


@dataclass(frozen=True)
class SourceReport:
    """What one source gave. ``tokens`` = ``kept`` + what packing dropped of it."""

    documents: int
    tokens: int
    kept: int


@dataclass(frozen=True)
class DropReport:
    """Tokens left out for one reason, and how many documents lost some."""

    documents: int
    tokens: int


@dataclass(frozen=True)
class ValidationReport:
    """The held-out documents: their number, their windows, and their tokens in these."""

    documents: int
    windows: int
    tokens: int


@dataclass(frozen=True)
class LengthBin:
    """Documents of ``at_least`` tokens, and of less than the next bin's, and their tokens."""

    at_least: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class PrepareReport:
    """The account of a prepared folder; ``tokens_in`` = ``tokens_kept`` + the dropped tokens.

    Tokens are the documents' own, EOS included; anchors are not counted among them. ``windows``,
    ``utilisation``, ``documents_cut`` and ``fingerprint`` are of the windows for training,
    ``tokens_kept`` counts those for validation too.
    """

    path: str
    reused: bool
    fingerprint: str
    vocab_size: int
    anchor_id: int | None
    window_tokens: int
    windows: int
    utilisation: float
    documents: int
    documents_cut: int
    tokens_in: int
    tokens_kept: int
    dropped: dict[str, DropReport]
    eos_added: int
    problems: dict[str, int]
    problem_examples: list[str]
    sources: dict[str, SourceReport]
    validation: ValidationReport | None
    document_tokens: dict[str, int]
    length_histogram: list[LengthBin]
    seconds: dict[str, float]

    @classmethod
    def from_meta(cls, path: Path, meta: dict[str, Any]) -> PrepareReport:
        """The report of a folder that was prepared earlier."""
        report = dict(meta["report"])
        report["dropped"] = {k: DropReport(**v) for k, v in report["dropped"].items()}
        report["sources"] = {k: SourceReport(**v) for k, v in report["sources"].items()}
        report["length_histogram"] = [LengthBin(**entry) for entry in report["length_histogram"]]
        if report["validation"] is not None:
            report["validation"] = ValidationReport(**report["validation"])
        train = meta["splits"][TRAIN]
        return cls(
            path=str(path),
            reused=True,
            fingerprint=train["fingerprint"],
            vocab_size=meta["vocab_size"],
            anchor_id=meta["anchor_id"],
            window_tokens=meta["window_tokens"],
            windows=train["num_windows"],
            documents=meta["num_documents"],
            **report,
        )
