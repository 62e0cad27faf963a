"""Work lists: a tile list cut for one kernel launch, made once per tile list on the host.

A kernel program owns a *block* of rows on one side (queries in forward and dq, keys in dk/dv) and
walks over rows of the other side. A row of a tile sees one interval of the other side: query row r
sees the keys ``[k_start, min(k_stop, r + k_stop - q_stop + 1))`` of a causal tile, key row c is
seen by the queries ``[max(q_start, c + q_stop - k_stop), q_stop)``, and a full tile drops the two
terms with r and c. Both sides thus have one form, ``[max(a, i + b), min(c, i + d))`` for row i,
and a block needs no more than two limits a row to mask any mixture of documents.

Blocks lie on a fixed grid of rows, not on document edges, and all tiles of a block whose key
intervals touch become one *item*: a block of 128 rows over ten documents of 12 tokens walks over
their 120 keys once, where a walk per document would compute ten padded blocks. An item with a part
that every row of the block sees in full is computed there without a mask.

Blocks are listed longest first, so that the last programs of a launch are its shortest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .interface import Tiles

_NEVER = np.int64(1) << 40


@dataclass(frozen=True, eq=False)
class WorkList:
    """What the programs of one launch compute.

    ``blocks`` int32 (B, 4): first own row, first item, item after the last, 0.
    ``items`` int32 (I, 4): ``start, full_start, full_stop, stop`` on the other side; rows
    ``full_start:full_stop`` are seen by every own row and, like ``start:full_start``, a multiple of
    ``step`` long.
    ``limits`` int32 (I, 2, block_rows): lowest visible row and the one after the highest, for every
    own row of the item's block; equal where an own row has no part in the item.
    """

    blocks: np.ndarray
    items: np.ndarray
    limits: np.ndarray
    block_rows: int
    step: int

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def num_steps(self) -> int:
        """Iterations of all programs of one head; each computes ``block_rows x step`` pairs."""
        return int(_steps(self.items, self.step).sum())


def query_work(
    tiles: Tiles,
    num_rows: int,
    block_rows: int,
    step: int,
    anchored: np.ndarray | None = None,
    exact: bool = False,
) -> WorkList:
    """Query blocks and the key intervals that each walks over.

    Args:
        tiles: what to compute.
        num_rows: N, query rows of the call.
        block_rows: query rows of a program.
        step: key rows of an iteration.
        anchored: bool (N,): rows that see an anchor; their blocks are listed even without a tile.
        exact: walk over the keys of each tile from its first on, apart from other tiles and masked
            all the way, so that a row meets the same operations whatever rows share its block.
    """
    q_start, q_stop, k_start, k_stop, causal = tiles.array.T
    runs = np.stack(
        [
            q_start,
            q_stop,
            k_start,
            np.full_like(k_start, -_NEVER),
            k_stop,
            np.where(causal == 1, k_stop - q_stop + 1, _NEVER),
        ],
        axis=1,
    )
    return _work(runs, num_rows, block_rows, step, anchored, apart=exact)


def key_work(tiles: Tiles, num_rows: int, block_rows: int, step: int) -> WorkList:
    """Key blocks and the query intervals that see them; arguments as for `query_work`, M rows."""
    q_start, q_stop, k_start, k_stop, causal = tiles.array.T
    runs = np.stack(
        [
            k_start,
            k_stop,
            q_start,
            np.where(causal == 1, q_stop - k_stop, -_NEVER),
            q_stop,
            np.full_like(q_stop, _NEVER),
        ],
        axis=1,
    )
    return _work(runs, num_rows, block_rows, step, None, apart=False)


@dataclass(frozen=True, eq=False)
class AnchorWork:
    """Which query rows see which anchor, as the kernels read it.

    ``row_anchor`` int32 (N,): the anchor's number, -1 for none.
    ``chunks`` int32 (C, 4): ``start, stop, anchor, 0``, every row in one chunk, all rows of a chunk
    under the same anchor, the chunks of anchor 0 first, then those of 1, …, those without at last.
    ``num_chunks``: chunks of each anchor.
    """

    row_anchor: np.ndarray
    chunks: np.ndarray
    num_chunks: tuple[int, ...]


def anchor_work(
    queries: np.ndarray, num_anchors: int, num_rows: int, chunk_rows: int
) -> AnchorWork:
    """``queries`` int64 (m, 3) ``anchor, q_start, q_stop``, disjoint, cut into chunks."""
    row_anchor = np.full(num_rows, -1, dtype=np.int32)
    for anchor, start, stop in queries.tolist():
        row_anchor[start:stop] = anchor
    changes = row_anchor[1:] != row_anchor[:-1]
    edges = np.flatnonzero(np.r_[num_rows > 0, changes])
    runs = [
        (start, stop, int(row_anchor[start]))
        for first, last in zip(edges, [*edges[1:], num_rows], strict=True)
        for start in range(int(first), int(last), chunk_rows)
        for stop in [min(start + chunk_rows, int(last))]
    ]
    runs.sort(key=lambda run: (run[2] < 0, run[2], run[0]))
    chunks = np.array([(*run, 0) for run in runs], dtype=np.int32).reshape(-1, 4)
    counts = tuple(int((chunks[:, 2] == anchor).sum()) for anchor in range(num_anchors))
    return AnchorWork(row_anchor, chunks, counts)


def _work(
    runs: np.ndarray,
    num_rows: int,
    block_rows: int,
    step: int,
    listed: np.ndarray | None,
    *,
    apart: bool,
) -> WorkList:
    """``runs`` int64 (T, 6): own rows ``start:stop``, then a, b, c, d of the module docstring;
    ``apart``: every run of a block is an item of its own, without a part that is seen in full."""
    pieces, block = _cut(runs, block_rows)
    first, last = pieces[:, 0], pieces[:, 1] - 1
    lo_first, lo_last = _low(pieces, first), _low(pieces, last)
    hi_first, hi_last = _high(pieces, first), _high(pieces, last)
    # In a block, pieces in the order of what they see join while they own later and later rows and
    # leave no gap of a whole step.
    new = np.ones(len(pieces), dtype=bool)
    new[1:] = (
        apart
        | (block[1:] != block[:-1])
        | (first[1:] <= last[:-1])
        | (lo_first[1:] - hi_last[:-1] >= step)
    )
    item = np.cumsum(new) - 1
    at = np.flatnonzero(new)
    start, stop = lo_first[at], _reduce(np.maximum, hi_last, at)
    item_block = block[at]

    rows_covered = _reduce(np.add, pieces[:, 1] - pieces[:, 0], at)
    rows_there = np.minimum(block_rows, num_rows - item_block * block_rows)
    full_start = start + -(-(_reduce(np.maximum, lo_last, at) - start) // step) * step
    full_steps = (_reduce(np.minimum, hi_first, at) - full_start) // step
    full = (rows_covered == rows_there) & (full_steps > 0) & (not apart)
    full_start = np.where(full, full_start, start)
    full_stop = full_start + np.where(full, full_steps * step, 0)

    items = np.stack([start, full_start, full_stop, stop], axis=1).astype(np.int32)
    limits = np.zeros((len(at), 2, block_rows), dtype=np.int32)
    size = pieces[:, 1] - pieces[:, 0]
    piece = np.repeat(np.arange(len(pieces)), size)
    own = np.arange(len(piece)) - np.repeat(np.cumsum(size) - size, size) + first[piece]
    limits[item[piece], 0, own % block_rows] = _low(pieces[piece], own)
    limits[item[piece], 1, own % block_rows] = _high(pieces[piece], own)
    return WorkList(
        _blocks(item_block, items, num_rows, block_rows, step, listed),
        items,
        limits,
        block_rows,
        step,
    )


def _cut(runs: np.ndarray, block_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Runs cut at the blocks' edges, sorted by block and by what they see; their block numbers."""
    first, last = runs[:, 0] // block_rows, (runs[:, 1] - 1) // block_rows
    count = last - first + 1
    pieces = np.repeat(runs, count, axis=0)
    block = np.arange(len(pieces)) - np.repeat(np.cumsum(count) - count, count)
    block += np.repeat(first, count)
    pieces[:, 0] = np.maximum(pieces[:, 0], block * block_rows)
    pieces[:, 1] = np.minimum(pieces[:, 1], (block + 1) * block_rows)
    order = np.lexsort((pieces[:, 0], _low(pieces, pieces[:, 0]), block))
    return pieces[order], block[order]


def _blocks(
    item_block: np.ndarray,
    items: np.ndarray,
    num_rows: int,
    block_rows: int,
    step: int,
    listed: np.ndarray | None,
) -> np.ndarray:
    """``blocks`` of a `WorkList`; those with rows in ``listed`` are there without items, too."""
    num_blocks = -(-num_rows // block_rows)
    count = np.bincount(item_block, minlength=num_blocks)
    stop = np.cumsum(count)
    steps = np.bincount(item_block, weights=_steps(items, step), minlength=num_blocks)
    keep = count > 0
    if listed is not None:
        keep |= (
            np.pad(listed, (0, num_blocks * block_rows - num_rows))
            .reshape(num_blocks, block_rows)
            .any(axis=1)
        )
    order = np.argsort(-steps, kind="stable")
    order = order[keep[order]]
    blocks = np.zeros((len(order), 4), dtype=np.int32)
    blocks[:, 0] = order * block_rows
    blocks[:, 1] = stop[order] - count[order]
    blocks[:, 2] = stop[order]
    return blocks


def _steps(items: np.ndarray, step: int) -> np.ndarray:
    start, full_start, full_stop, stop = items.astype(np.int64).T
    edges = full_start - start + stop - full_stop
    return (full_stop - full_start) // step + -(-edges // step)


def _low(pieces: np.ndarray, own: np.ndarray) -> np.ndarray:
    return np.maximum(pieces[:, 2], own + pieces[:, 3])


def _high(pieces: np.ndarray, own: np.ndarray) -> np.ndarray:
    return np.minimum(pieces[:, 4], own + pieces[:, 5])


def _reduce(function: np.ufunc, values: np.ndarray, at: np.ndarray) -> np.ndarray:
    """``function.reduceat`` that takes no pieces at all, too."""
    return function.reduceat(values, at) if len(at) else values[:0]
