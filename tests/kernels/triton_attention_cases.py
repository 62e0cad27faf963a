"""The Triton engine against autograd in fp64 over an explicit mask, anchors and RoPE included.

Run by test_triton_interpreter.py. The interpreter's bf16 rounding cuts off, so that its errors are
up to twice those of rounding to nearest.
"""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from anchorcontext import Window, distributed_attention, make_plan
from anchorcontext.errors import UserError
from anchorcontext.kernels import SoftmaxState, Tiles, get_engine, triton_config
from anchorcontext.kernels.anchored import (
    AnchorKeys,
    backward_with_anchors_,
    forward_with_anchors_,
)
from anchorcontext.kernels.reference import ReferenceEngine
from anchorcontext.kernels.rotation import Rotation, rotate
from anchorcontext.kernels.triton_config import Config
from anchorcontext.kernels.triton_engine import TritonEngine
from anchorcontext.parallel import plan_rotations

SCALE = 0.3  # not D ** -0.5
NO_ANCHORS = np.zeros((0, 3), dtype=np.int64)
NAMES = ("out", "lse", "dq", "dk", "dv", "d_anchors")
# Norm of the error over the norm of the result.
RELATIVE_ERROR = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
SEVERAL = [(0, 30, 0, 20, 0), (0, 30, 20, 60, 1), (8, 9, 60, 64, 0), (35, 42, 3, 10, 1)]


def make_inputs(oracle, tiles, heads, dtype, head_dim, queries=NO_ANCHORS) -> SimpleNamespace:
    array = np.asarray(tiles).reshape(-1, 5)
    rows = [int(array[:, column].max(initial=0)) + 2 for column in (1, 3)]
    rows[0] = max(rows[0], int(queries[:, 2].max(initial=0)))
    x = oracle.inputs(*rows, heads, dtype, head_dim)
    more = oracle.inputs(1, 4, (1, 2 * heads[1]), dtype, head_dim, seed=1)
    x.anchors = AnchorKeys(more.k.unflatten(1, (2, -1))[:2], queries)
    return x


def run(engine, x, parts, **options) -> SimpleNamespace:
    """Forward and backward, the anchors in the last of the calls ``parts``."""
    state = SoftmaxState.empty(x.q)
    parts = [Tiles(part) for part in parts]
    for tiles in parts[:-1]:
        engine.forward(x.q, x.k, x.v, tiles, SCALE, state, **options)
    if options:
        engine.forward(x.q, x.k, x.v, parts[-1], SCALE, state, anchors=x.anchors, **options)
    else:
        forward_with_anchors_(engine, x.q, x.k, x.v, parts[-1], SCALE, state, x.anchors)
    dq, dk, dv, d_anchors = (
        torch.zeros(y.shape, dtype=torch.float32) for y in (x.q, x.k, x.v, x.anchors.rows)
    )
    out = state.out.to(x.q.dtype)
    args = (x.dout, x.q, x.k, x.v, out, state.lse)
    for tiles in parts[:-1]:
        engine.backward(*args, tiles, SCALE, dq, dk, dv, **options)
    last = (*args, parts[-1], SCALE, dq, dk, dv)
    if options:
        engine.backward(*last, anchors=x.anchors, d_anchors=d_anchors, **options)
    else:
        backward_with_anchors_(engine, *last, x.anchors, d_anchors)
    return SimpleNamespace(out=state.out, lse=state.lse, dq=dq, dk=dk, dv=dv, d_anchors=d_anchors)


def expect(oracle, x, tiles) -> SimpleNamespace:
    """The dense oracle with the anchors as two more keys at the end."""
    num_keys, num_anchors = len(x.k), len(x.anchors.rows)
    visible = torch.zeros(len(x.q), num_keys + num_anchors, dtype=torch.bool)
    visible[:, :num_keys] = oracle.visible(np.asarray(tiles).reshape(-1, 5), len(x.q), num_keys)
    for anchor, start, stop in x.anchors.queries.tolist():
        visible[start:stop, num_keys + anchor] = True
    k, v = (torch.cat([y, x.anchors.rows[:, i]]) for i, y in enumerate((x.k, x.v)))
    dense = oracle.attention(x.q, k, v, x.dout, visible, SCALE)
    (dk, dk0), (dv, dv0) = (y.split([num_keys, num_anchors]) for y in (dense.dk, dense.dv))
    return SimpleNamespace(
        out=dense.out, lse=dense.lse, dq=dense.dq, dk=dk, dv=dv,
        d_anchors=torch.stack([dk0, dv0], 1),
    )  # fmt: skip


def assert_close(found, expected, tolerance) -> None:
    assert torch.equal(found.lse == -math.inf, expected.lse == -math.inf)
    for name in NAMES:
        a, b = (getattr(y, name).double().nan_to_num(neginf=0.0) for y in (found, expected))
        assert torch.isfinite(a).all(), name
        assert (a - b).norm() <= tolerance * b.norm() + 1e-12, name


def check(oracle, tiles, heads, dtype, head_dim, queries=NO_ANCHORS) -> None:
    x = make_inputs(oracle, tiles, heads, dtype, head_dim, queries)
    found = run(TritonEngine(), x, [tiles])
    assert_close(found, expect(oracle, x, tiles), RELATIVE_ERROR[dtype])


def test_tile_lists(tile_list, oracle):
    short = [tile for tile in tile_list if tile[1] <= 64]  # the interpreter is slow; none is a case
    check(oracle, short, (1, 1), torch.float32, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(4, 1), (6, 2), (8, 8)], ids=lambda h: f"{h[0]}q{h[1]}kv")
def test_grouped_heads(heads, dtype, oracle):
    check(oracle, [(0, 9, 0, 9, 1), (9, 11, 0, 14, 1)], heads, dtype, 16, np.array([[0, 3, 10]]))


@pytest.mark.parametrize("head_dim", [8, 64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_head_dimensions(dtype, head_dim, oracle):
    check(oracle, [(0, 13, 0, 20, 1)], (1, 1), dtype, head_dim, np.array([[1, 5, 13]]))


@pytest.mark.parametrize("dtype", RELATIVE_ERROR, ids=str)
def test_anchors_inside_and_outside_the_tiles(dtype, oracle):
    """Two anchors that meet inside a block, rows under an anchor alone, rows under nothing."""
    queries = np.array([[0, 3, 20], [1, 20, 33], [0, 43, 45]])
    check(oracle, SEVERAL, (2, 1), dtype, 16, queries)


@pytest.mark.parametrize(
    ("by_query", "by_key"), [((32, 16), (16, 32)), ((16, 32), (32, 16))], ids=str
)
def test_every_kernel_has_blocks_of_its_own(by_query, by_key, oracle, monkeypatch):
    """Wide and high blocks, as on a GPU, and others forward than backward; anchored rows in
    several chunks."""
    sizes = {"forward": by_query, "dq": by_query[::-1], "dkdv": by_key}
    monkeypatch.setattr(
        TritonEngine, "_config", lambda self, kernel, *_: Config(*sizes[kernel], 4, 1)
    )
    monkeypatch.setattr(triton_config, "CHUNK_ROWS", 16)
    tiles = [(0, 50, 0, 70, 1), (50, 60, 3, 40, 0), (60, 62, 0, 2, 1)]
    check(oracle, tiles, (2, 1), torch.float32, 16, np.array([[0, 3, 40], [1, 40, 61]]))


def test_a_tile_list_serves_different_anchored_rows(oracle):
    tiles, x = (
        Tiles([(0, 4, 0, 4, 1)]),
        make_inputs(oracle, [(0, 20, 0, 4, 0)], (1, 1), torch.float32, 16),
    )
    for queries in ([[0, 4, 6]], [[1, 4, 6]], [[1, 8, 20]]):
        found, fresh = (SoftmaxState.empty(x.q) for _ in range(2))
        anchors = AnchorKeys(x.anchors.rows, np.array(queries))
        for state, some in ((found, tiles), (fresh, Tiles(tiles.array))):
            TritonEngine().forward(x.q, x.k, x.v, some, SCALE, state, anchors=anchors)
        assert torch.equal(found.out, fresh.out) and torch.equal(found.lse, fresh.lse)


def test_anchors_without_a_tile(oracle):
    check(oracle, [], (2, 1), torch.float32, 16, np.array([[1, 2, 19]]))


def test_documents_of_one_token(oracle):
    tiles = [(a, a + 1, a, a + 1, 1) for a in range(21)]
    check(oracle, tiles, (2, 1), torch.bfloat16, 16, np.array([[0, 1, 21]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_state_carried_over_calls_has_the_error_of_one_call(dtype, oracle):
    """Keys in 1 and in 6 calls: the error against fp64 does not grow with the calls."""
    queries = np.array([[0, 4, 14]])
    whole = [(0, 14, 0, 48, 0)]
    parts = [[(0, 14, a, a + 8, 0)] for a in range(0, 48, 8)]
    x = make_inputs(oracle, whole, (2, 1), dtype, 16, queries)
    expected = expect(oracle, x, whole)
    errors = []
    for calls in ([whole], parts):
        found = run(TritonEngine(), x, calls)
        assert_close(found, expected, RELATIVE_ERROR[dtype])
        errors.append(float((found.out - expected.out).norm() / expected.out.norm()))
    # Probabilities are rounded to bf16 relative to another maximum, the state never is.
    assert errors[1] <= (1.5 * errors[0] if dtype == torch.bfloat16 else 2e-7)


def test_rows_that_see_nothing_keep_their_state_bit_for_bit(oracle):
    x = make_inputs(oracle, [(0, 24, 0, 24, 1)], (2, 1), torch.float32, 16)
    generator = torch.Generator().manual_seed(5)
    out = torch.randn(x.q.shape, generator=generator)
    lse = 3 * torch.randn(x.q.shape[:2], generator=generator)
    out[7], lse[7] = 0, -math.inf
    state = SoftmaxState(out.clone(), lse.clone())
    TritonEngine().forward(x.q, x.k, x.v, Tiles([(3, 5, 20, 24, 0)]), SCALE, state)
    kept = [row for row in range(len(x.q)) if row not in (3, 4)]
    assert torch.equal(state.out[kept], out[kept]) and torch.equal(state.lse[kept], lse[kept])
    assert not torch.equal(state.lse[3:5], lse[3:5])


def test_gradients_are_added_and_zero_where_nothing_was_seen(oracle):
    x = make_inputs(oracle, [(0, 8, 0, 8, 1)], (2, 1), torch.float32, 16)
    state = SoftmaxState.empty(x.q)
    grads = [torch.ones_like(y) for y in (x.q, x.k, x.v)]
    tiles = Tiles([(0, 8, 0, 8, 1)])
    TritonEngine().backward(x.dout, x.q, x.k, x.v, state.out, state.lse, tiles, SCALE, *grads)
    assert all(torch.equal(grad, torch.ones_like(grad)) for grad in grads)


def test_what_one_document_holds_does_not_reach_another_in_the_same_block(oracle):
    tiles = [(0, 5, 0, 5, 1), (5, 13, 5, 13, 1)]
    x = make_inputs(oracle, tiles, (2, 1), torch.bfloat16, 16)
    before = run(TritonEngine(), x, [tiles])
    for y in (x.q, x.k, x.v, x.dout):
        y[:5] += 1
    after = run(TritonEngine(), x, [tiles])
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert torch.equal(getattr(before, name)[5:], getattr(after, name)[5:]), name


def test_inputs_may_be_strided_views(oracle):
    tiles = [(0, 13, 0, 20, 1)]
    x = make_inputs(oracle, tiles, (4, 2), torch.float32, 16)
    expected = run(TritonEngine(), x, [tiles])
    fused = torch.cat([x.k, x.v], dim=1)
    head_major = x.q.transpose(0, 1).contiguous().transpose(0, 1)
    parts = {"q": head_major, "k": fused[:, :2], "v": fused[:, 2:], "dout": x.dout}
    views = SimpleNamespace(**parts, anchors=x.anchors)
    found = run(TritonEngine(), views, [tiles])
    assert all(torch.equal(getattr(found, name), getattr(expected, name)) for name in NAMES)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("ieee", torch.float32), ("tf32x3", torch.bfloat16)], ids=str
)
def test_rotation_inside_the_kernel(precision, dtype, oracle):
    """Rotating in the kernel equals fp32 queries and keys rotated beforehand; V stays in dtype."""
    queries, heads, head_dim = np.array([[0, 4, 24], [1, 30, 35]]), (2, 1), 24
    x = make_inputs(oracle, SEVERAL, heads, dtype, head_dim, queries)
    generator = torch.Generator().manual_seed(2)
    angles = [
        7 * torch.rand(len(y), head_dim // 2, generator=generator)
        for y in (x.q, x.k, x.anchors.rows)
    ]
    tables = [f(angle) for angle in angles for f in (torch.cos, torch.sin)]
    rotation = Rotation(*tables)
    found = run(TritonEngine(precision), x, [SEVERAL[:2], SEVERAL[2:]], rotation=rotation)

    doubles = [angle.double() for angle in angles]
    turned = SimpleNamespace(q=turn(x.q, doubles[0]), k=turn(x.k, doubles[1]), v=x.v, dout=x.dout)
    rows = torch.stack([turn(x.anchors.rows[:, 0], doubles[2]), x.anchors.rows[:, 1]], 1)
    turned.anchors = AnchorKeys(rows, queries)
    expected = expect(oracle, turned, SEVERAL)
    expected.dq = turn(expected.dq, -doubles[0])
    expected.dk = turn(expected.dk, -doubles[1])
    expected.d_anchors[:, 0] = turn(expected.d_anchors[:, 0], -doubles[2])
    assert_close(found, expected, RELATIVE_ERROR[dtype])
    # What the rotation costs nothing: with scores in fp32, so is the lse.
    assert_close_lse(found.lse, expected.lse)


def turn(x, angles) -> torch.Tensor:
    return rotate(x.double(), angles.cos(), angles.sin())


def assert_close_lse(found, expected) -> None:
    seen = expected != -math.inf
    assert (found[seen] - expected[seen]).abs().max() <= 5e-6


def test_an_engine_without_anchors_gets_the_correction_afterwards(oracle):
    x = make_inputs(oracle, SEVERAL, (2, 1), torch.float32, 16, np.array([[0, 3, 20]]))
    assert_close(run(ReferenceEngine(), x, [SEVERAL]), expect(oracle, x, SEVERAL), 2e-6)


def angles_of_8(positions) -> tuple[torch.Tensor, torch.Tensor]:
    angles = positions[:, None] * 3.0 ** -torch.arange(8)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("unrotated", [False, True])
def test_a_plan_gives_the_result_of_the_reference(unrotated, oracle):
    """Two windows with an anchor each, forward and backward, the engine chosen by name; and with
    queries and keys that both engines rotate, each in its way."""
    documents = [[[1] * 5, [2] * 1, [3] * 9], [[4] * 7, [5] * 8]]
    windows = [Window.from_documents(pieces, anchor_id=0) for pieces in documents]
    generator = torch.Generator().manual_seed(4)
    inputs = [torch.randn(2, heads, 16, 16, generator=generator) for heads in (2, 1, 1, 2)]
    results = []
    for engine in ("triton", "reference"):
        q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
        plan = make_plan(windows, engine=engine)
        rotations = plan_rotations(plan, angles_of_8, q.device) if unrotated else None
        out = distributed_attention(q, k, v, plan, rotations=rotations)
        out.backward(inputs[3])
        results.append((out.detach(), q.grad, k.grad, v.grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exact_rows_have_the_same_bits_however_a_document_is_cut(dtype, oracle):
    """Queries of a document together, and in pieces at other rows, between rows of others; the
    keys at another place. All see the anchor."""
    length, cuts = 75, [0, 5, 22, 61, 75]
    x = oracle.inputs(length, length, (2, 1), dtype, 16)
    anchor = oracle.inputs(1, 2, (1, 1), dtype, 16, seed=1).k[None]
    found = []
    for edges, gap, k_start in ((cuts[::4], 3, 0), (cuts, 7, 9)):
        tiles = [(1, 3, 0, 2 + k_start, 1)]  # another document's, on the same rows of a block
        for first, stop in pairwise(edges):
            row = tiles[-1][1] + gap
            tiles.append((row, row + stop - first, k_start, k_start + stop, 1))
        held = torch.cat([torch.arange(a, b) for a, b, *_ in tiles[1:]])
        q = torch.zeros(tiles[-1][1] + 2, *x.q.shape[1:], dtype=dtype)
        k, v = (torch.zeros(k_start + length + 2, 1, 16, dtype=dtype) for _ in range(2))
        q[held], k[k_start : k_start + length], v[k_start : k_start + length] = x.q, x.k, x.v
        queries = np.array([[0, a, b] for a, b, *_ in tiles[1:]])
        state = SoftmaxState.empty(q)
        engine = get_engine("triton", device=q.device, dtype=dtype, exact=True)
        forward_with_anchors_(
            engine, q, k, v, Tiles(tiles, exact=True), SCALE, state, AnchorKeys(anchor, queries)
        )
        found.append((state.out[held], state.lse[held]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    x.anchors = AnchorKeys(anchor, np.array([[0, 0, length]]))
    expected = expect(oracle, x, [(0, length, 0, length, 1)])
    for a, b in zip(found[0], (expected.out, expected.lse), strict=True):
        assert (a - b).norm() <= RELATIVE_ERROR[dtype] * b.norm()


def test_work_is_listed_once_per_tile_list(oracle):
    x = make_inputs(oracle, SEVERAL, (2, 1), torch.float32, 16)
    tiles = Tiles(SEVERAL)
    TritonEngine().forward(x.q, x.k, x.v, tiles, SCALE, SoftmaxState.empty(x.q))
    held = dict(tiles.cache)
    TritonEngine().forward(x.q, x.k, x.v, tiles, SCALE, SoftmaxState.empty(x.q))
    assert held and tiles.cache == held


def test_what_it_cannot_compute_is_refused(oracle):
    cpu = torch.device("cpu")
    assert get_engine("triton", device=cpu, dtype=torch.float32).name == "triton"
    assert get_engine(device=cpu, dtype=torch.float32).name == "cpu"
    with pytest.raises(UserError, match=r"not torch\.float64"):
        get_engine("triton", device=cpu, dtype=torch.float64)
    x = make_inputs(oracle, [(0, 2, 0, 2, 1)], (1, 1), torch.float32, 320)
    args = (x.k, x.v, Tiles([(0, 2, 0, 2, 1)]))
    with pytest.raises(UserError, match="head dimension 320"):
        TritonEngine().forward(x.q, *args, SCALE, SoftmaxState.empty(x.q))
    with pytest.raises(UserError, match="scale -1"):
        TritonEngine().forward(x.q[..., :64], *args, -1.0, SoftmaxState.empty(x.q))
