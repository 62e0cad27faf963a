"""The independent oracle of the kernel tests: torch autograd over an explicit boolean mask."""

from __future__ import annotations

import math
import os
import shlex
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from anchorcontext.kernels import cpu_library

TILE_LISTS = {
    "full": [(0, 24, 0, 40, 0)],
    "causal square": [(0, 33, 0, 33, 1)],
    "causal bottom-right": [(5, 20, 3, 40, 1)],
    "several tiles over the same rows": [(0, 30, 0, 20, 0), (0, 30, 20, 60, 1), (8, 9, 60, 64, 0)],
    "one-token tiles": [(0, 1, 0, 1, 1), (1, 2, 0, 9, 1), (2, 3, 5, 6, 0), (7, 8, 8, 9, 1)],
    "rows without a tile": [(4, 9, 4, 9, 1), (20, 31, 40, 52, 0)],
    "documents that grow": [(0, 3, 0, 3, 1), (3, 10, 3, 10, 1), (12, 30, 9, 40, 1)],
    "equal documents end to end": [(a, a + 8, a, a + 8, 1) for a in range(0, 48, 8)],
    "equal shapes, scattered": [(a, a + 5, 60 - a, 65 - a, 1) for a in (0, 7, 19, 40)],
    "equal shapes over the same rows": [(0, 8, 0, 8, 0), (0, 8, 8, 16, 0), (4, 12, 20, 28, 0)],
    "longer than the operator's blocks": [(0, 300, 0, 300, 1), (300, 310, 0, 620, 1)],
}


def visible_pairs(tiles, num_queries: int, num_keys: int) -> torch.Tensor:
    """bool (N, M), straight from the words of the `Tiles` docstring; no pair twice."""
    count = torch.zeros(num_queries, num_keys, dtype=torch.int64)
    for q_start, q_stop, k_start, k_stop, causal in np.asarray(tiles).tolist():
        for row in range(q_start, q_stop):
            end = k_stop - (q_stop - 1 - row) if causal else k_stop
            count[row, k_start:end] += 1
    assert count.max() <= 1
    return count == 1


def dense_attention(q, k, v, dout, visible, scale) -> SimpleNamespace:
    """out, lse and the gradients dq, dk, dv of q (N, Hq, D), k and v (M, Hkv, D), all in fp64."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k_all, v_all = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,mhd->qhm", q, k_all) * scale
    scores = scores.masked_fill(~visible[:, None, :], -math.inf)
    seen = visible.any(dim=1)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    lse[seen] = torch.logsumexp(scores[seen], dim=-1).detach()
    out = torch.zeros(q.shape, dtype=torch.float64)
    out[seen] = torch.einsum("qhm,mhd->qhd", torch.softmax(scores[seen], dim=-1), v_all)
    out.backward(dout.double())
    return SimpleNamespace(out=out.detach(), lse=lse, dq=q.grad, dk=k.grad, dv=v.grad)


def random_inputs(num_queries, num_keys, heads, dtype, head_dim=16, seed=0) -> SimpleNamespace:
    """Seeded q, dout (N, Hq, D) and k, v (M, Hkv, D), drawn in fp64 and rounded to ``dtype``."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads

    def draw(rows, num):
        x = torch.randn(rows, num, head_dim, generator=generator, dtype=torch.float64)
        return x.to(dtype)

    return SimpleNamespace(
        q=draw(num_queries, num_heads),
        k=draw(num_keys, num_kv_heads),
        v=draw(num_keys, num_kv_heads),
        dout=draw(num_queries, num_heads),
    )


@pytest.fixture(scope="session")
def c_kernels() -> None:
    """Skips without a C compiler. With one, kernels that do not compile are a failure."""
    command = shlex.split(os.environ.get("CC", "cc"))
    if not command or shutil.which(command[0]) is None or command == ["false"]:
        pytest.skip(f"no C compiler: {command}")
    cpu_library.library()


@pytest.fixture
def no_c_kernels(monkeypatch) -> None:
    """Everything goes through torch."""
    monkeypatch.setattr(cpu_library, "_missing", lambda: "switched off by a test")


@pytest.fixture(scope="session")
def oracle() -> SimpleNamespace:
    return SimpleNamespace(
        tile_lists=TILE_LISTS,
        visible=visible_pairs,
        attention=dense_attention,
        inputs=random_inputs,
    )


def pytest_generate_tests(metafunc):
    if "tile_list" in metafunc.fixturenames:
        metafunc.parametrize("tile_list", list(TILE_LISTS.values()), ids=list(TILE_LISTS))
