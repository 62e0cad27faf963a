"""``cpu_kernels.c`` as Python sees it: who may call it, its arguments, threads to call it on."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise

import torch

from .compiled import CompilerError, load

logger = logging.getLogger("anchorcontext")

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_COUNT = ctypes.c_int64


class Matrix(ctypes.Structure):
    """Rows (N, H, D) of fp32 or bf16, strides in elements."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("row_stride", _COUNT),
        ("head_stride", _COUNT),
        ("is_bf16", _COUNT),
    )

    @classmethod
    def of(cls, x: torch.Tensor, accumulator: bool = False) -> Matrix:
        """``x`` (N, H, D), which must outlive the call; C adds to accumulators, in fp32."""
        assert x.device.type == "cpu" and x.dtype in _DTYPES, "see why_not"
        assert not accumulator or x.dtype == torch.float32, "accumulators are fp32"
        assert x.stride(-1) == 1 or x.shape[-1] == 1, "the last dimension is contiguous"
        return cls(x.data_ptr(), x.stride(0), x.stride(1), _DTYPES[x.dtype])


class ShortJob(ctypes.Structure):
    """``Job`` of the C file."""

    _fields_ = (
        *((name, Matrix) for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")),
        ("lse", ctypes.c_void_p),
        ("lse_row_stride", _COUNT),
        ("lse_head_stride", _COUNT),
        ("tiles", ctypes.c_void_p),
        ("units", ctypes.c_void_p),
        ("num_heads", _COUNT),
        ("num_key_heads", _COUNT),
        ("head_dim", _COUNT),
        ("scale", ctypes.c_float),
    )


class AnchorJob(ctypes.Structure):
    """``AnchorJob`` of the C file."""

    _fields_ = (
        *((name, Matrix) for name in ("q", "out", "dout", "dq")),
        ("lse", ctypes.c_void_p),
        ("lse_row_stride", _COUNT),
        ("lse_head_stride", _COUNT),
        ("k0", ctypes.c_void_p),
        ("v0", ctypes.c_void_p),
        ("num_heads", _COUNT),
        ("num_key_heads", _COUNT),
        ("head_dim", _COUNT),
        ("scale", ctypes.c_float),
    )


def why_not(*tensors: torch.Tensor) -> str | None:
    """Why the kernels cannot serve these tensors here; None when they can."""
    for x in tensors:
        if x.device.type != "cpu":
            return f"they run on cpu tensors, not on {x.device.type}"
        if x.dtype not in _DTYPES:
            return f"they take fp32 and bf16, not {x.dtype}"
    return _missing()


def rows_of(lse: torch.Tensor) -> dict[str, int]:
    """The LSE's fields of a job: (N, Hq), fp32."""
    assert lse.device.type == "cpu" and lse.dtype == torch.float32, "the LSE is fp32"
    return {
        "lse": lse.data_ptr(),
        "lse_row_stride": lse.stride(0),
        "lse_head_stride": lse.stride(1),
    }


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernels.

    Raises:
        CompilerError: there is no compiler.
    """
    found = load("cpu_kernels")
    address = ctypes.c_void_p
    for name, job, more in (
        ("short_forward", ShortJob, ()),
        ("short_backward", ShortJob, ()),
        ("anchor_forward", AnchorJob, ()),
        ("anchor_backward", AnchorJob, (address, address)),
    ):
        function = getattr(found, name)
        function.argtypes = (ctypes.POINTER(job), _COUNT, _COUNT, address, *more)
        function.restype = None
    for name in ("short_scratch_elements", "anchor_scratch_elements"):
        getattr(found, name).argtypes, getattr(found, name).restype = (_COUNT, _COUNT), _COUNT
    return found


def side_by_side(run: Callable[[int, int], None], edges: Sequence[int]) -> None:
    """``run(first, last)`` of every two neighbours in ``edges``, each on a thread of its own."""
    if len(edges) == 2:
        run(*edges)
        return
    # ctypes lets other threads run while a kernel does.
    pool = _pool(len(edges) - 1, os.getpid())
    parts = [pool.submit(run, first, last) for first, last in pairwise(edges)]
    try:
        for part in parts:
            part.result()
    finally:
        wait(parts)  # a kernel that still runs writes into tensors of the caller


def scratch_of(elements: int) -> torch.Tensor:
    """fp32 scratch of so many elements that begins with a cache line."""
    scratch = empty(elements + 16)
    return scratch[-(scratch.data_ptr() // 4) % 16 :]


def empty(*shape: int) -> torch.Tensor:
    """fp32 on the CPU, whatever torch's defaults are: C writes into it."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


@functools.cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads of this process: a fork has none of its parent's."""
    return ThreadPoolExecutor(threads, thread_name_prefix="anchorcontext-cpu")


@functools.cache
def _missing() -> str | None:
    try:
        library()
    except CompilerError as error:
        logger.warning("attention on the CPU goes through torch alone, which is slower: %s", error)
        return str(error)
    return None
