"""Every control across ranks against dense fp64 attention, forward and backward, to 1e-10.

Mask and positions of the oracle are written out here, document by document; queries and keys are
rotated by them in the oracle; in the run by the positions of each rank's shard, and again by the
engine, which gets the rotations that the plan makes of them.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from anchorcontext.testing import run_distributed

HEADS, KV_HEADS, HEAD_DIM, SCALE = 4, 2, 8, 0.3
LENGTHS = (7, 13, 1, 23, 16)
L = sum(LENGTHS)
TOLERANCE = 1e-10


def starts():
    """First token of every document, without an anchor."""
    return np.cumsum([0, *LENGTHS[:-1]])


def blocks(first):
    """Documents see themselves; ``first`` tokens stand in front of them."""
    mask = np.zeros((first + L, first + L), dtype=bool)
    for start, length in zip(starts() + first, LENGTHS, strict=True):
        mask[start : start + length, start : start + length] = True
    mask[:first, :first] = True
    return np.tril(mask)


def anchored():
    mask = blocks(1)
    mask[:, 0] = True
    return mask


def changed(positions, at, value):
    positions = positions.copy()
    positions[at] = value
    return positions


PLACES = np.arange(1 + L)
RESTARTED = np.concatenate([[0], *(np.arange(1, 1 + n) for n in LENGTHS)])
FULL = np.tril(np.ones((L, L), dtype=bool))
# mode, controls, mask, positions
CASES = {
    "hidden": ("anchor", {"anchor_visible": False}, blocks(1), PLACES),
    "elsewhere": ("anchor", {"anchor_position": 99}, anchored(), changed(PLACES, 0, 99)),
    "restart": ("anchor", {"reset_positions": True}, anchored(), RESTARTED),
    "clamped full": ("full", {"clamp_first": True}, FULL, changed(PLACES[:-1], starts(), 0)),
    "clamped, shifted": (
        "intra_doc",
        {"clamp_first": True, "offset": 500},
        blocks(0),
        changed(PLACES[:-1] + 500, starts(), 0),
    ),
    "clamped behind an anchor": (
        "anchor",
        {"clamp_first": True},
        anchored(),
        changed(PLACES, starts() + 1, 0),
    ),
    "anchor elsewhere, shifted": (
        "anchor",
        {"anchor_position": 3, "offset": 50},
        anchored(),
        np.r_[3, PLACES[1:] + 50],
    ),
}


def make_window(name):
    from anchorcontext import Window
    from anchorcontext.modes import with_controls

    mode, controls, _, _ = CASES[name]
    documents = [np.arange(1, n + 1) for n in LENGTHS]
    return Window.from_documents(
        documents, 0 if mode == "anchor" else None, with_controls(mode, **controls)
    )


def rotate(x, positions):
    """x (..., L, D) by RoPE with base 100, so that these positions turn it far."""
    frequencies = 100.0 ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    angles = positions.double().unsqueeze(-1) * frequencies
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def oracle_of(name):
    """q, k, v, dout and out, dq, dk, dv of the whole window: (heads, L, D)."""
    from anchorcontext.testing.oracle import dense_attention

    _, _, mask, positions = CASES[name]
    generator = torch.Generator().manual_seed(0)
    shape = (len(positions), HEAD_DIM)
    q, k, v, dout = (
        torch.randn(heads, *shape, generator=generator, dtype=torch.float64)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    k[:, 0] *= 5  # an anchor that matters
    v[:, 0] *= 5
    given = [x.clone().requires_grad_() for x in (q, k, v)]
    positions = torch.from_numpy(positions)
    out = dense_attention(
        rotate(given[0], positions),
        rotate(given[1], positions),
        given[2],
        torch.from_numpy(mask),
        SCALE,
    )
    out.backward(dout)
    return (q, k, v, dout), (out.detach(), *(x.grad for x in given))


def tables(positions):
    """Cosines and sines (T, D / 2) as an engine takes them, here in fp64."""
    cos, sin = (
        rotate(torch.tensor(unit, dtype=torch.float64).expand(len(positions), -1), positions)
        for unit in ([1.0] * (HEAD_DIM // 2) + [0.0] * (HEAD_DIM // 2),) * 2
    )
    return cos[:, : HEAD_DIM // 2].contiguous(), sin[:, HEAD_DIM // 2 :].contiguous()


def check(rank, world, batches, ways):
    import torch.distributed as dist

    from anchorcontext import distributed_attention, make_plan, shard
    from anchorcontext.parallel import plan_rotations

    for names in batches:
        oracles = [oracle_of(name) for name in names]
        windows = [make_window(name) for name in names]
        for layout, exchange, options in ways:
            plan = make_plan(windows, dist.group.WORLD, layout, exchange, engine="cpu", **options)
            held = [torch.from_numpy(plan.data.local_indices(rank, w)) for w in range(len(names))]
            real = torch.stack([h < w.num_tokens for h, w in zip(held, windows, strict=True)])
            rows = [h.clamp(max=w.num_tokens - 1) for h, w in zip(held, windows, strict=True)]

            def local(x, rows=rows):
                """Of one tensor a window, this rank's part (B, H, S, D)."""
                return torch.stack([y[:, r] for y, r in zip(x, rows, strict=True)])

            given = [
                local(x) * real[:, None, :, None]
                for x in zip(*(o[0] for o in oracles), strict=True)
            ]
            expected = [local(x) for x in zip(*(o[1] for o in oracles), strict=True)]
            for by_engine in (False, True):
                q, k, v = (x.clone().requires_grad_() for x in given[:3])
                rotations, arguments = None, (q, k)
                if by_engine:
                    rotations = plan_rotations(plan, tables, torch.device("cpu"))
                else:
                    positions = shard(windows, plan).position_ids[:, None]
                    arguments = rotate(q, positions), rotate(k, positions)
                out = distributed_attention(*arguments, v, plan, SCALE, rotations)
                out.backward(given[3])
                for what, x, y in zip(
                    ("out", "dq", "dk", "dv"), (out, q.grad, k.grad, v.grad), expected, strict=True
                ):
                    error = (x - y).abs().movedim(1, 2)[real]
                    worst = error.max() if error.numel() else 0
                    case = f"{names}, {layout}, {exchange}, {options}, by engine {by_engine}"
                    assert worst <= TOLERANCE * y.abs().max(), f"{what} of {case}: {worst:.1e}"


@pytest.mark.parametrize(
    ("world", "batches"),
    [
        (1, [(name,) for name in CASES]),
        (2, [*((name,) for name in CASES), ("elsewhere", "restart")]),
        (4, [("elsewhere",), ("clamped full",), ("anchor elsewhere, shifted", "elsewhere")]),
    ],
    ids=["1", "2", "4"],
)
def test_ranks_compute_what_dense_attention_does(world, batches):
    ways = [("zigzag", "ring", {}), ("balanced", "gather", {})]
    if world < 4:
        ways += [("contiguous", "ulysses", {}), ("contiguous", "gather", {"exact": True})]
    else:
        ways += [("zigzag", "hybrid", {"ulysses": 2})]
    run_distributed(check, world, batches, ways)


def test_masks_are_those_of_the_modes():
    """For the plans are made from documents, and only pictures and counts from masks."""
    from anchorcontext.modes import visible

    for name, (_, _, mask, positions) in CASES.items():
        window = make_window(name)
        assert (visible(window.mode, window.doc_ids) == mask).all(), name
        assert window.position_ids.tolist() == positions.tolist(), name
