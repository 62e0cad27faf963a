"""Layouts of the literature that ``balanced`` is compared with in benchmarks.

``document_zigzag`` is also what backend ``ring_flash_attn`` asks for. Both give runs as
:mod:`.runs` describes, for a window padded to a multiple of P.
"""

from __future__ import annotations

import heapq

import numpy as np

from ..window import Window
from .runs import join_runs

CHUNKS_PER_RANK = 8


def document_zigzag(window: Window, padded_length: int, sp_size: int) -> np.ndarray:
    """Every document in 2P chunks, rank r holds chunks r and 2P-1-r of each of them.

    As ring-flash-attention's zigzag for packed sequences, which asks for lengths that 2P divides;
    here chunk edges are rounded, so that ranks differ by a few tokens.
    """
    edges = np.r_[window.cu_seqlens, padded_length][:, None]
    share = np.arange(2 * sp_size + 1)[None, :]
    cut = edges[:-1] + (np.diff(edges, axis=0) * share + sp_size) // (2 * sp_size)
    chunk = np.arange(2 * sp_size)
    rank = np.broadcast_to(np.minimum(chunk, 2 * sp_size - 1 - chunk), cut[:, 1:].shape)
    runs = np.stack([cut[:, :-1].ravel(), cut[:, 1:].ravel(), rank.ravel()], axis=1)
    return _listed(runs[runs[:, 0] < runs[:, 1]])


def min_heap_chunks(window: Window, padded_length: int, sp_size: int) -> np.ndarray:
    """Equal chunks of the window, by falling work, each to the rank with the least so far.

    Ranks take the same number of chunks (``CHUNKS_PER_RANK``, fewer where the rows of a rank do not
    divide so). As MagiAttention's dispatch solver (arXiv 2505.13211).
    """
    local_length = padded_length // sp_size
    per_rank = max(n for n in range(1, CHUNKS_PER_RANK + 1) if local_length % n == 0)
    size = local_length // per_rank
    length = window.num_tokens
    first = np.repeat(window.cu_seqlens[:-1], np.diff(window.cu_seqlens))
    visible = np.zeros(padded_length, dtype=np.int64)
    visible[:length] = np.arange(length) - first + 1
    work = visible.reshape(-1, size).sum(axis=1)
    heap = [(0, rank, per_rank) for rank in range(sp_size)]
    runs = []
    for chunk in np.argsort(-work, kind="stable").tolist():
        load, rank, left = heapq.heappop(heap)
        runs.append((chunk * size, (chunk + 1) * size, rank))
        if left > 1:
            heapq.heappush(heap, (load + int(work[chunk]), rank, left - 1))
    return _listed(np.array(runs, dtype=np.int64))


def _listed(runs: np.ndarray) -> np.ndarray:
    return join_runs(runs[np.lexsort((runs[:, 0], runs[:, 2]))].astype(np.int64))
