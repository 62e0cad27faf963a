"""The anchor's correction on a CPU, by ``cpu_kernels.c``: one pass where torch takes six.

Same functions, same arguments as in :mod:`.merge`, which derives them and is the oracle.
"""

from __future__ import annotations

import ctypes

import torch

from .cpu_library import AnchorJob, Matrix, empty, library, rows_of, scratch_of, side_by_side
from .interface import SoftmaxState

# Sums over so many rows are fp32; a fixed number, so that threads do not change them.
CHUNK_ROWS = 256


def anchor_forward_(
    state: SoftmaxState,
    q: torch.Tensor,
    k0: torch.Tensor,
    v0: torch.Tensor,
    scale: float,
    start: int,
    stop: int,
) -> None:
    """:func:`.merge.anchor_forward_` for fp32 and bf16."""
    k0, v0 = k0.float().contiguous(), v0.float().contiguous()
    job = _job(q, state.out, state.lse, k0, v0, scale)
    job.out = Matrix.of(state.out, accumulator=True)
    lib = library()
    elements = lib.anchor_scratch_elements(q.shape[2], k0.shape[0])

    def run(first: int, last: int) -> None:
        scratch = scratch_of(elements)
        lib.anchor_forward(ctypes.byref(job), first, last, scratch.data_ptr())

    side_by_side(run, _edges(start, stop))


def anchor_backward_(
    dout: torch.Tensor,
    q: torch.Tensor,
    k0: torch.Tensor,
    v0: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    start: int,
    stop: int,
    dq: torch.Tensor,
    dk0: torch.Tensor,
    dv0: torch.Tensor,
) -> None:
    """:func:`.merge.anchor_backward_` for fp32 and bf16."""
    k0, v0 = k0.float().contiguous(), v0.float().contiguous()
    job = _job(q, out, lse, k0, v0, scale)
    job.dout, job.dq = Matrix.of(dout), Matrix.of(dq, accumulator=True)
    lib = library()
    elements = lib.anchor_scratch_elements(q.shape[2], k0.shape[0])
    chunks = range(start, stop, CHUNK_ROWS)
    sums = empty(2, len(chunks), *k0.shape)

    def run(first: int, last: int) -> None:
        scratch = scratch_of(elements)
        for row in range(first, last, CHUNK_ROWS):
            into = [part[(row - start) // CHUNK_ROWS].data_ptr() for part in sums]
            lib.anchor_backward(
                ctypes.byref(job), row, min(row + CHUNK_ROWS, last), scratch.data_ptr(), *into
            )

    side_by_side(run, _edges(start, stop))
    dk0 += sums[0].sum(0)
    dv0 += sums[1].sum(0)


def _job(
    q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    k0: torch.Tensor,
    v0: torch.Tensor,
    scale: float,
) -> AnchorJob:
    return AnchorJob(
        q=Matrix.of(q),
        out=Matrix.of(out),
        **rows_of(lse),
        k0=k0.data_ptr(),
        v0=v0.data_ptr(),
        num_heads=q.shape[1],
        num_key_heads=k0.shape[0],
        head_dim=q.shape[2],
        scale=scale,
    )


def _edges(start: int, stop: int) -> list[int]:
    """Rows for each of torch's threads, whole chunks."""
    chunks = -(-(stop - start) // CHUNK_ROWS)
    threads = max(1, min(torch.get_num_threads(), chunks // 4))
    places = [start + chunks * thread // threads * CHUNK_ROWS for thread in range(threads)]
    return [*places, stop]
