"""Backend ring_flash_attn: the real package on gloo ranks, its flash-attn over CPU tensors.

Against a dense oracle in fp64: ``llama3_varlen``, which computes in the tensors' own dtype, at
1e-12; the zigzag functions and the ring, which are right in bf16 alone, at bf16's rounding.
"""

from __future__ import annotations

import importlib.util
import sys
from itertools import product
from typing import NamedTuple

import pytest

from anchorcontext.errors import UserError
from anchorcontext.parallel.ring_flash_attn import check_request
from anchorcontext.testing import run_distributed
from anchorcontext.testing.flash_attn_cpu import install_flash_attn_cpu

HEAD_DIM, SCALE = 8, 0.3
BF16 = 2e-2


class Case(NamedTuple):
    """A micro-batch, and which of the package's functions serves it."""

    function: str
    mode: str
    layout: str
    exchange: str
    batch: tuple[tuple[int, ...], ...]
    heads: tuple[int, int] = (4, 2)


UNEVEN = ((7, 1, 17, 7), (1, 30, 1), (1,) * 12, (30,), (9, 8, 8, 12, 8, 12))


def cases(world):
    chunks = 2 * world
    even = ((chunks, 3 * chunks), (2 * chunks,), (chunks, chunks, 2 * chunks))
    found = [
        Case("llama3_varlen", mode, layout, exchange, (lengths,), heads)
        for lengths, heads in zip(UNEVEN, [(4, 2), (9, 3), (4, 1), (8, 2), (4, 4)], strict=True)
        for mode, layout, exchange in (
            ("intra_doc", "auto", "auto"),
            ("intra_doc_reset", "contiguous", "gather"),
            ("full", "contiguous", "auto"),
        )
    ]
    found += [
        Case("zigzag_ring", "full", layout, "auto", (lengths,), (9, 3))
        for lengths in UNEVEN
        for layout in ("auto", "zigzag")
    ]
    found += [Case("ring", "full", "contiguous", "ring", (lengths,)) for lengths in UNEVEN]
    found += [
        Case("zigzag_ring_varlen", mode, "zigzag", "auto", (lengths,), (4, 1))
        for lengths in even
        for mode in ("intra_doc", "intra_doc_reset")
    ]
    # Windows of several lengths in one micro-batch: the shorter ones are padded.
    found += [
        Case("llama3_varlen", "intra_doc", "auto", "auto", UNEVEN),
        Case("zigzag_ring", "full", "auto", "auto", UNEVEN),
        Case("ring", "full", "contiguous", "ring", UNEVEN),
        Case("zigzag_ring_varlen", "intra_doc", "zigzag", "ring", even),
    ]
    return found


def count_what_travels(world):
    """Wrap the calls of torch.distributed that the package makes; returns the growing count."""
    import torch.distributed as dist

    sent = [0]

    def counting(call, num_bytes):
        def counted(*args, **kwargs):
            sent[0] += num_bytes(*args)
            return call(*args, **kwargs)

        return counted

    def of_messages(operations):
        return sum(op.tensor.nbytes for op in operations if op.op is dist.isend)

    # Bandwidth-optimal collectives: a rank sends its share to, or a part for, every other rank.
    def of_collective(output, given):
        return (world - 1) * min(output.nbytes, given.nbytes)

    dist.batch_isend_irecv = counting(dist.batch_isend_irecv, of_messages)
    dist.all_gather_into_tensor = counting(dist.all_gather_into_tensor, of_collective)
    dist.reduce_scatter_tensor = counting(dist.reduce_scatter_tensor, of_collective)
    return sent


def check_cases(rank, world, cases, groups=None):
    """Every case on all ranks, or on each of ``groups`` that this rank is in."""
    import torch.distributed as dist

    install_flash_attn_cpu()
    mine = [dist.new_group(ranks) for ranks in groups or [list(range(world))]]
    mine = [group for group in mine if group is not dist.GroupMember.NON_GROUP_MEMBER]
    sent = count_what_travels(dist.get_world_size(mine[0]))
    for group, case in product(mine, cases):
        try:
            check_case(group, case, sent)
        except Exception as error:
            raise AssertionError(f"{world} ranks, {case}: {error}") from error


def check_case(group, case, sent):
    """Out, dq, dk and dv of this rank's rows, and bytes: predicted, counted by the meter, sent."""
    import torch

    from anchorcontext import Window, distributed_attention, make_plan
    from anchorcontext.testing.oracle import dense_attention, dense_mask

    windows = [
        Window.from_documents(map(range, lengths), None, case.mode) for lengths in case.batch
    ]
    plan = make_plan(windows, group, case.layout, case.exchange, backend="ring_flash_attn")
    rank = plan.sp_rank
    assert plan.data.algorithm.name == case.function
    dtype = torch.float64 if case.function == "llama3_varlen" else torch.bfloat16
    heads, kv_heads = case.heads
    counts = (heads, kv_heads, kv_heads, heads)
    generator = torch.Generator().manual_seed(0)
    shape = (len(windows), sum(counts), plan.padded_length, HEAD_DIM)
    whole = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    local = torch.stack(
        [whole[b][:, plan.data.local_indices(rank, b)] for b in range(len(windows))]
    )
    q, k, v, dout = (x.clone().requires_grad_() for x in local.split(counts, dim=1))
    sent_before = sent[0]
    out = distributed_attention(q, k, v, plan, scale=SCALE)
    out.backward(dout.detach())
    assert out.dtype == q.grad.dtype == k.grad.dtype == v.grad.dtype == dtype
    for b, window in enumerate(windows):
        length = window.num_tokens
        given = [x.double().requires_grad_() for x in whole[b, :, :length].split(counts)]
        mask = dense_mask(window.doc_ids.tolist(), case.mode)
        expected = dense_attention(*given[:3], mask, SCALE)
        expected.backward(given[3].detach())
        held = torch.from_numpy(plan.data.local_indices(rank, b))
        real = held < length
        results = (
            ("out", out, expected),
            *(
                (f"d{name}", x.grad, y.grad)
                for name, x, y in zip("qkv", (q, k, v), given[:3], strict=True)
            ),
        )
        for name, got, want in results:
            assert (got[b][:, ~real] == 0).all(), f"{name} on padding"
            difference = got[b][:, real].double() - want[:, held[real]]
            error = difference.abs().max().item() if real.any() else 0.0
            limit = (1e-12 if dtype == torch.float64 else BF16) * max(1.0, want.abs().max().item())
            assert error <= limit, f"{name} of window {b} is off by {error}"
    predicted = plan.predicted_bytes(
        num_layers=1, num_heads=heads, num_kv_heads=kv_heads, head_dim=HEAD_DIM, dtype=dtype
    )
    assert sent[0] - sent_before == plan.meter.bytes_sent == predicted > 0


@pytest.mark.parametrize("world", [2, 4])
def test_forward_and_backward_equal_the_dense_oracle(world):
    run_distributed(check_cases, world, cases(world))


def test_groups_of_some_ranks_with_others_between_them():
    """The package's neighbours are the group's. Ranks 1 and 2 have another place in their second
    group, where they are given the plans of the first one again, which are cached."""
    one_of_each = {case.function: case for case in cases(2)}
    groups = [[0, 2], [1, 3], [0, 1], [2, 3]]
    run_distributed(check_cases, 4, list(one_of_each.values()), groups)


@pytest.fixture
def flash_attn_cpu():
    """flash_attn over CPU tensors in this process, and gone after the test."""
    before = set(sys.modules)
    yield install_flash_attn_cpu()
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("flash_attn", "ring_flash_attn"):
            del sys.modules[name]


def attend(mode="full", layout="auto", exchange="auto", dtype="bfloat16", head_dim=8):
    """The call of rank 0 of 2; refused before it needs the other one."""
    import torch

    from anchorcontext import Window, distributed_attention
    from anchorcontext.parallel import Plan
    from anchorcontext.plan import RingFlashAttnPlan

    window = Window.from_documents([range(16)], None, mode)
    plan = Plan(RingFlashAttnPlan([window], 2, layout, exchange))
    q = torch.zeros(1, 2, plan.local_length, head_dim, dtype=getattr(torch, dtype))
    distributed_attention(q, q, q, plan)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float32"}, "q is float32: ring-flash-attn's zigzag_ring .* model.dtype bf16"),
        ({"dtype": "float64", "mode": "intra_doc", "layout": "zigzag"}, "zigzag_ring_varlen"),
        ({"dtype": "float16", "layout": "contiguous", "exchange": "ring"}, "for bfloat16 alone"),
        ({"head_dim": 12}, "head dimension 12: .* multiples of 8 up to 256"),
        ({"head_dim": 264}, "head dimension 264"),
    ],
)
def test_what_the_package_would_compute_wrongly_is_refused(flash_attn_cpu, options, message):
    with pytest.raises(UserError, match=message):
        attend(**options)


def test_flash_attn_of_cuda_takes_no_cpu_tensors(flash_attn_cpu, monkeypatch):
    monkeypatch.delattr(flash_attn_cpu, "device_type")
    with pytest.raises(UserError, match=r"q is on cpu: .* computes on cuda; use attention.backend"):
        attend()


@pytest.mark.parametrize(
    ("missing", "line"),
    [
        ("ring_flash_attn", "pip install --no-deps ring-flash-attn==0.1.8"),
        ("flash_attn", "pip install --no-build-isolation flash-attn, which needs CUDA"),
    ],
)
def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch, missing, line):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == missing else find_spec(name)
    )
    with pytest.raises(UserError, match=f"{missing} is not installed; {line}"):
        attend()


def test_kernels_and_overlap_cannot_be_chosen(flash_attn_cpu):
    with pytest.raises(UserError, match=r"engine 'cpu': .* flash-attn computes"):
        check_request("cpu", overlap=True)
    with pytest.raises(UserError, match="overlap False"):
        check_request("auto", overlap=False)
    check_request("auto", overlap=True)
