"""Counting: what went in, what is in which windows, what was dropped and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .packing import Packing
from .sources import ProblemLog
from .sources.documents import MAX_EXAMPLES
from .store import TRAIN, VALIDATION
from .tokens import Progress, TokenisedCorpus

RENDERED_ANCHOR = "rendered_anchor"
QUANTILES = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


def account(
    corpus: TokenisedCorpus,
    progress: Progress,
    log: ProblemLog,
    chosen: Mapping[str, np.ndarray],
    packings: Mapping[str, Packing],
    left_out: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    """The numbers of :class:`~.report.PrepareReport` that a finished folder keeps.

    ``chosen``: the documents of each split in the order of its packing; ``left_out``: documents
    that were not packed, by reason.
    """
    lengths = corpus.lengths
    dropped = {
        reason: {"documents": len(documents), "tokens": int(lengths[documents].sum())}
        for reason, documents in left_out.items()
    }
    for packing in packings.values():
        for reason, part in packing.dropped.items():
            entry = dropped.setdefault(reason, {"documents": 0, "tokens": 0})
            entry["documents"] += part.num_documents
            entry["tokens"] += part.num_tokens
    if progress.rendered_anchors:
        dropped[RENDERED_ANCHOR] = {
            "documents": progress.rendered_documents,
            "tokens": progress.rendered_anchors,
        }
    quantiles = np.quantile(lengths, list(QUANTILES.values()), method="nearest")
    return {
        "utilisation": packings[TRAIN].utilisation,
        "documents_cut": packings[TRAIN].num_cut,
        "tokens_in": int(lengths.sum()) + progress.rendered_anchors,
        "tokens_kept": sum(packing.num_kept for packing in packings.values()),
        "dropped": dropped,
        "eos_added": progress.eos_added,
        "problems": log.counts,
        "problem_examples": [str(problem) for problem in log.problems[:MAX_EXAMPLES]],
        "sources": _sources(corpus, chosen, packings),
        "validation": _validation(chosen, packings),
        "document_tokens": dict(zip(QUANTILES, map(int, quantiles), strict=True)),
        "length_histogram": length_histogram(lengths),
    }


def length_histogram(lengths: np.ndarray) -> list[dict[str, int]]:
    """Documents and their tokens by length, in bins that begin at 0, 1, 2, 4, 8, ... tokens."""
    exponent = np.frexp(lengths.astype(np.float64))[1]
    documents = np.bincount(exponent)
    tokens = np.bincount(exponent, lengths)
    return [
        {"at_least": (1 << k) >> 1, "documents": int(documents[k]), "tokens": int(tokens[k])}
        for k in range(len(documents))
        if documents[k]
    ]


def _sources(
    corpus: TokenisedCorpus, chosen: Mapping[str, np.ndarray], packings: Mapping[str, Packing]
) -> dict[str, dict[str, int]]:
    count = len(corpus.source_names)
    documents = np.bincount(corpus.sources, minlength=count)
    tokens = np.bincount(corpus.sources, corpus.lengths, count)
    kept = np.zeros(count)
    for split, packing in packings.items():
        numbers = chosen[split][packing.segments.documents]
        kept += np.bincount(corpus.sources[numbers], packing.segments.lengths, count)
    return {
        name: {"documents": int(documents[i]), "tokens": int(tokens[i]), "kept": int(kept[i])}
        for i, name in enumerate(corpus.source_names)
    }


def _validation(
    chosen: Mapping[str, np.ndarray], packings: Mapping[str, Packing]
) -> dict[str, int] | None:
    if VALIDATION not in packings:
        return None
    packing = packings[VALIDATION]
    return {
        "documents": len(chosen[VALIDATION]),
        "windows": packing.num_windows,
        "tokens": packing.num_kept,
    }
