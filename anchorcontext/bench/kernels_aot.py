"""The Triton kernels, compiled ahead of time for Hopper and Ampere: what their code shows."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence

import anchorcontext.kernels.aot as aot

from ..errors import UserError
from ..markdown import markdown_table

HEADERS = (
    "kernel",
    "head",
    "inputs",
    "sm",
    "blocks M x N",
    "warps",
    "stages",
    "registers",
    "spilled, B",
    "shared, KiB",
    "HGMMA",
    "HMMA",
)


def bench_kernels_aot(head_dims: Sequence[int], say: Callable[[str], None]) -> list[aot.Compiled]:
    """Compile every kernel with its default blocks; ``say`` gets a line for each.

    Raises:
        UserError: Triton is missing, or would interpret the kernels.
    """
    if importlib.util.find_spec("triton") is None:
        raise UserError("kernels-aot: Triton is not installed; pip install 'triton>=3.6'")
    from triton import knobs

    if knobs.runtime.interpret:
        raise UserError("kernels-aot: TRITON_INTERPRET is set, nothing is compiled; unset it")
    return list(_compile(head_dims, say))


def _compile(head_dims: Sequence[int], say: Callable[[str], None]) -> Iterator[aot.Compiled]:
    for variant in aot.variants(head_dims):
        for capability in aot.CAPABILITIES:
            compiled = aot.compile_variant(variant, capability)
            say("  ".join(row(compiled)))
            yield compiled


def row(compiled: aot.Compiled) -> tuple[str, ...]:
    """The cells of `HEADERS`."""
    variant = compiled.variant
    config = variant.config(compiled.capability)
    tiled = variant.kernel in aot.TILE_KERNELS
    return (
        variant.kernel,
        str(variant.head_dim),
        variant.inputs,
        str(compiled.capability),
        f"{config.block_m} x {config.block_n}" if tiled else str(config.block_m),
        str(config.num_warps),
        str(config.num_stages),
        str(compiled.registers),
        str(compiled.spill_bytes),
        f"{compiled.shared_bytes / 1024:.1f}",
        str(compiled.hgmma),
        str(compiled.hmma),
    )


def triton_release() -> str:
    """Major and minor version of the Triton that compiles, which names the section of the page."""
    import triton

    return ".".join(triton.__version__.split(".")[:2])


def kernels_aot_markdown(results: Sequence[aot.Compiled], command: str) -> str:
    """The section of docs/kernels.md."""
    release = triton_release()
    spilled = sum(result.spills for result in results)
    return "\n\n".join(
        [
            f"### What the compiler makes of them, Triton {release}",
            f"Written by `{command}`; no GPU took part. {spilled} of {len(results)} spill. Default "
            "block sizes, 4 query heads a key head, anchors in the launch. *Spilled*: bytes of "
            "stack a thread needs beyond its 255 registers. *HGMMA*, *HMMA*: tensor-core "
            "instructions in the code (warp-group and warp products).",
            markdown_table(HEADERS, [row(result) for result in results]),
        ]
    )
