"""The Triton kernels compile for Hopper and Ampere without a GPU, fit, and use the tensor cores.

A fresh cache takes about a minute of one core; what was compiled once comes from Triton's cache.
The other head dimensions: ``anchorcontext bench kernels-aot``.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from anchorcontext.kernels import aot
from anchorcontext.kernels.aot import Variant

HEAD_DIMS = (64, 128)


@pytest.mark.parametrize("capability", aot.CAPABILITIES, ids=lambda c: f"sm_{c}")
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kernel", aot.TILE_KERNELS)
def test_bf16_kernels_do_not_spill_and_use_the_tensor_cores(kernel, head_dim, capability):
    compiled = aot.compile_variant(Variant(kernel, head_dim, "bf16"), capability)
    assert not compiled.spills, compiled
    assert compiled.registers <= 255
    assert compiled.shared_bytes <= aot.SHARED_LIMIT[capability]
    if capability == 90:
        assert compiled.hgmma > 0 and compiled.hmma == 0, compiled
    else:
        assert compiled.hmma > 0, compiled


@pytest.mark.parametrize("kernel", ["prepare", *aot.MERGE_KERNELS])
def test_kernels_without_products_do_not_spill(kernel):
    compiled = aot.compile_variant(Variant(kernel, 128, "bf16"), 90)
    assert not compiled.spills, compiled
    assert compiled.registers <= 168, "three programs of 128 threads an SM, at least"
