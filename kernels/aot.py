"""Ahead-of-time compilation of the Triton kernels, on a machine without a GPU.

Each kernel is compiled with the block sizes the engine uses by default, and the machine code is
read back with the ``cuobjdump`` and ``nvdisasm`` that come with Triton: registers, spills, shared
memory and tensor-core instructions. What this shows is that a kernel fits the device and how its
products are computed; neither that it is right (the interpreter's tests do) nor how fast it is.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import triton_config
from .triton_config import Config

CAPABILITIES = (90, 80)
HEAD_DIMS = (64, 96, 128, 256)
TILE_KERNELS = triton_config.KERNELS
MERGE_KERNELS = ("merge", "anchor_forward", "anchor_backward")
# Bytes of shared memory a program may have, CUDA C++ Programming Guide, table of features.
SHARED_LIMIT = {90: 227 * 1024, 80: 163 * 1024}

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_INT_ARRAYS = ("row_anchor", "blocks", "items", "limits", "chunks")
_INPUTS = ("q", "k", "v", "dout", "v0", "block_out")


@dataclass(frozen=True)
class Variant:
    """One kernel as the engine would launch it: GQA group of 4, anchors, default blocks."""

    kernel: str
    head_dim: int
    dtype: str
    """bf16, fp16 or fp32."""
    rope: bool = False

    def config(self, capability: int) -> Config:
        """Block sizes, warps and stages on a device of ``capability``."""
        if self.kernel == "prepare":
            return triton_config.prepare_config(self.head_dim)
        if self.kernel not in triton_config.KERNELS:
            backward = self.kernel == "anchor_backward"
            return triton_config.ANCHOR_BACKWARD if backward else triton_config.PREPARE
        return triton_config.candidates(
            self.kernel,
            self.head_dim,
            _DTYPES[self.dtype],
            self.rope,
            divmod(capability, 10),
        )[0]

    @property
    def inputs(self) -> str:
        """dtype of q, k, v in words, with RoPE where it is computed in the kernel."""
        return self.dtype + (" + fp32 RoPE" if self.rope else "")


@dataclass(frozen=True)
class Compiled:
    """What the machine code of a `Variant` says for one compute capability."""

    variant: Variant
    capability: int
    registers: int
    spill_bytes: int
    """Bytes of stack a thread needs; registers spill there."""
    local_accesses: int
    """Loads and stores of local memory in the code: spills."""
    shared_bytes: int
    hgmma: int
    """Warp-group products (sm_90)."""
    hmma: int
    """Warp products (sm_80; sm_90 for small blocks and fp32)."""

    @property
    def spills(self) -> bool:
        """Whether registers did not suffice."""
        return self.spill_bytes > 0 or self.local_accesses > 0


def variants(head_dims: Sequence[int] = HEAD_DIMS) -> Iterator[Variant]:
    """Every kernel at every head dimension with every kind of input it takes: tiles in bf16, fp16
    and fp32 and, rotated in the kernel, bf16 (at 128 fp16 as well)."""
    for head_dim in head_dims:
        for dtype in _DTYPES:
            for kernel in (*TILE_KERNELS, "prepare"):
                yield Variant(kernel, head_dim, dtype)
        for kernel in MERGE_KERNELS:
            yield Variant(kernel, head_dim, "bf16")
        for dtype in ("bf16", "fp16") if head_dim == 128 else ("bf16",):
            for kernel in (*TILE_KERNELS, "prepare"):
                yield Variant(kernel, head_dim, dtype, rope=True)


def compile_variant(variant: Variant, capability: int) -> Compiled:
    """Compile for ``capability`` (90 for Hopper, 80 for Ampere) and read the machine code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = _function(variant.kernel)
    signature, attributes = _signature(function.arg_names, variant)
    config = variant.config(capability)
    constants = {
        name: value
        for name, value in _constants(variant, config).items()
        if name in function.arg_names
    }
    compiled = triton.compile(
        ASTSource(function, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "enable_fp_fusion": True,
        },
    )
    return _read(variant, capability, compiled.asm["cubin"], compiled.metadata.shared)


def _function(kernel: str) -> Any:
    from . import triton_backward, triton_forward, triton_merge

    return {
        "merge": triton_merge.merge_kernel,
        "anchor_forward": triton_merge.anchor_forward_kernel,
        "anchor_backward": triton_merge.anchor_backward_kernel,
        "forward": triton_forward.forward_kernel,
        "prepare": triton_backward.prepare_kernel,
        "dq": triton_backward.dq_kernel,
        "dkdv": triton_backward.dkdv_kernel,
    }[kernel]


def _constants(variant: Variant, config: Config) -> dict[str, Any]:
    half = variant.head_dim // 2
    return {
        "GROUP": 4,
        **triton_config.columns(variant.head_dim, _DTYPES[variant.dtype], variant.rope),
        "BLOCK_D": triton_config.block_columns(variant.head_dim),
        "BLOCK_HALF": triton_config.block_columns(half),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_R": config.block_m,
        "CHUNK_R": triton_config.CHUNK_ROWS,
        "SCATTERED": False,
        "ANCHOR": True,
        "PRECISION": "tf32x3",
    }


def _signature(names: list[str], variant: Variant) -> tuple[dict[str, str], dict]:
    """Types of the arguments by name, and which are multiples of 16, as a real launch has them:
    pointers, and the strides of contiguous (rows, heads, D) tensors."""
    signature, attributes = {}, {}
    for index, name in enumerate(names):
        if name.isupper():
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = "*" + _element_type(name.removesuffix("_ptr"), variant)
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
        stride = name.endswith(("_row", "_head")) and "lse" not in name
        if name.endswith("_ptr") or stride:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, attributes


def _element_type(array: str, variant: Variant) -> str:
    if array in _INT_ARRAYS:
        return "i32"
    if array == "rows":
        return "i64"
    saved_out = array == "out" and variant.kernel in ("prepare", "anchor_backward")
    if array in _INPUTS or saved_out or (array == "k0" and not variant.rope):
        return variant.dtype
    return "fp32"


def _read(variant: Variant, capability: int, cubin: bytes, shared: int) -> Compiled:
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _tool_output(knobs.nvidia.cuobjdump.path, "-res-usage", path)
        code = _tool_output(knobs.nvidia.nvdisasm.path, "-c", path)
    numbers = {key: int(value) for key, value in re.findall(r"\b(REG|STACK):(\d+)", usage)}
    return Compiled(
        variant=variant,
        capability=capability,
        registers=numbers["REG"],
        spill_bytes=numbers["STACK"],
        local_accesses=_count(r"(?:LDL|STL)", code),
        shared_bytes=shared,
        hgmma=_count(r"HGMMA", code),
        hmma=_count(r"HMMA", code),
    )


def _tool_output(tool: str, option: str, path: Path) -> str:
    return subprocess.run(
        [tool, option, str(path)], check=True, capture_output=True, text=True
    ).stdout


def _count(instruction: str, code: str) -> int:
    return len(re.findall(rf"\b{instruction}\b", code))
