"""The Triton kernels compile for Hopper and Ampere without a GPU, fit, and use the tensor cores.

Of `aot.variants`, which ``anchorcontext bench kernels-aot`` compiles whole, those that stand for a
kind: every head dimension and every kind of input, a kernel or more of each. A fresh cache takes
about a minute of one core; what was compiled once comes from Triton's cache.
"""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton")

from anchorcontext.kernels import aot
from anchorcontext.kernels.aot import Variant

BF16 = [(kernel, head_dim) for head_dim in (64, 128) for kernel in aot.TILE_KERNELS]
WIDE = [("forward", 96, 80), ("dkdv", 256, 90)]  # bf16, where they are tightest
IN_PARTS = [
    (Variant("forward", 96, "fp32"), 80),
    (Variant("dq", 128, "fp32"), 90),
    (Variant("dkdv", 256, "fp32"), 80),
    (Variant("forward", 64, "bf16", rope=True), 90),
    (Variant("dq", 256, "bf16", rope=True), 90),
    (Variant("dkdv", 128, "bf16", rope=True), 90),
]


def check(compiled: aot.Compiled) -> None:
    """Neither spills nor too much shared memory, and tensor-core instructions."""
    assert not compiled.spills, compiled
    assert compiled.registers <= 255
    assert compiled.shared_bytes <= aot.SHARED_LIMIT[compiled.capability]
    assert compiled.hgmma + compiled.hmma > 0, compiled


@pytest.mark.parametrize("capability", aot.CAPABILITIES, ids=lambda c: f"sm_{c}")
@pytest.mark.parametrize(("kernel", "head_dim"), BF16)
def test_bf16_kernels_do_not_spill_and_use_the_tensor_cores(kernel, head_dim, capability):
    compiled = aot.compile_variant(Variant(kernel, head_dim, "bf16"), capability)
    check(compiled)
    if capability == 90:
        assert compiled.hgmma > 0 and compiled.hmma == 0, compiled


@pytest.mark.parametrize(("kernel", "head_dim", "capability"), WIDE)
def test_other_head_dimensions_do_not_spill(kernel, head_dim, capability):
    check(aot.compile_variant(Variant(kernel, head_dim, "bf16"), capability))


@pytest.mark.parametrize(("variant", "capability"), IN_PARTS, ids=str)
def test_fp32_and_rotated_kernels_do_not_spill(variant, capability):
    check(aot.compile_variant(variant, capability))


@pytest.mark.parametrize("kernel", ["prepare", *aot.MERGE_KERNELS])
def test_kernels_without_products_do_not_spill(kernel):
    compiled = aot.compile_variant(Variant(kernel, 128, "bf16"), 90)
    assert not compiled.spills, compiled
    assert compiled.registers <= 168, "three programs of 128 threads an SM, at least"


def test_the_command_compiles_every_kind_of_every_kernel():
    found = set(aot.variants())
    kinds = [("bf16", False), ("fp16", False), ("fp32", False), ("bf16", True)]
    for head_dim, kernel, kind in itertools.product(aot.HEAD_DIMS, aot.TILE_KERNELS, kinds):
        assert Variant(kernel, head_dim, *kind) in found
    assert {variant for variant, _ in IN_PARTS} <= found
