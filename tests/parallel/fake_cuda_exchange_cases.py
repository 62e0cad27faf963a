"""Distributed attention on CUDA tensors without values, on ranks of torch's "fake" group: no layer,
forward or backward, makes the host wait for the device.

Run by tests/test_fake_cuda.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from anchorcontext import Window, distributed_attention, make_plan, shard
from anchorcontext.kernels.pinned import to_device
from anchorcontext.parallel import plan_rotations, transfer
from anchorcontext.parallel.keep import keep_attention
from anchorcontext.parallel.mesh import group_device, warm_up
from anchorcontext.plan.cache import PlanCache
from anchorcontext.testing.fake_cuda import fake_cuda

RANKS = 4
EXCHANGES = (("ring", 1), ("gather", 1), ("ulysses", 4), ("hybrid", 2))
DOCUMENTS = ((7, 13, 5, 23, 16), (30, 9))  # the second window is padded
HEADS, HEAD_DIM = (8, 4), 16
CUDA = torch.device("cuda", 0)


@pytest.fixture(params=[0, RANKS - 1], ids=lambda rank: f"rank {rank}")
def group(request, monkeypatch):
    """This process as one of four ranks; messages are checked as NCCL wants them, and lost."""
    dist.init_process_group("fake", rank=request.param, world_size=RANKS, store=FakeStore())
    batch = dist.batch_isend_irecv

    def checked(operations):
        for operation in operations:
            assert operation.tensor.device == CUDA and operation.tensor.is_contiguous()
            assert 0 <= operation.peer < RANKS and operation.peer != request.param
        return batch(operations)

    monkeypatch.setattr(transfer.dist, "batch_isend_irecv", checked)
    monkeypatch.setattr("anchorcontext.parallel.plan.PLANS", PlanCache())
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def device():
    with fake_cuda() as found:
        yield found


def windows(mode):
    return [
        Window.from_documents([list(range(3, n + 3)) for n in lengths], anchor_id=1, mode=mode)
        for lengths in DOCUMENTS
    ]


def rows(plan, dtype=torch.bfloat16):
    """q, k and v of the rank, on the device."""
    shape = (plan.batch_size, plan.local_length, HEAD_DIM)
    return [
        torch.randn(shape[0], heads, *shape[1:], device=CUDA, dtype=dtype, requires_grad=True)
        for heads in (HEADS[0], HEADS[1], HEADS[1])
    ]


def step(plan, tensors, rotations=None):
    out = distributed_attention(*tensors, plan, rotations=rotations)
    grads = torch.autograd.grad(out, tensors, torch.ones_like(out))
    for tensor, result in zip([tensors[0], *tensors], [out, *grads], strict=True):
        assert (result.shape, result.dtype, result.device) == (tensor.shape, tensor.dtype, CUDA)


def check(device, plan, dtype=torch.bfloat16, rotations=None):
    """Two layers; the second copies nothing to or from the device."""
    tensors = rows(plan, dtype)
    step(plan, tensors, rotations)
    copies = device.copies
    step(plan, tensors, rotations)
    assert device.copies == copies


@pytest.mark.parametrize(("mode", "layout"), [("anchor", "zigzag"), ("intra_doc", "balanced")])
@pytest.mark.parametrize(("exchange", "team"), EXCHANGES)
def test_layers_do_not_wait(group, device, exchange, team, mode, layout):
    plan = make_plan(windows(mode), group, layout, exchange, ulysses=team, verify=False)
    check(device, plan)
    assert plan.engine(CUDA, torch.bfloat16).name == "varlen"


@pytest.mark.parametrize(("exchange", "team"), EXCHANGES)
def test_an_engine_that_takes_the_anchors_along(group, device, exchange, team):
    plan = make_plan(
        windows("anchor"), group, "contiguous", exchange,
        ulysses=team, engine="triton", verify=False, overlap=False,
    )  # fmt: skip
    check(device, plan)


@pytest.mark.parametrize("engine", ["triton", "reference"])
def test_the_engine_rotates(group, device, engine):
    one = Window.from_documents([[3] * 20, [4] * 20], anchor_id=1, mode="anchor")
    plan = make_plan(one, group, "zigzag", "ring", engine=engine, verify=False)

    def tables(positions):
        angles = positions[:, None] * torch.ones(HEAD_DIM // 2, device=CUDA)
        return angles.cos(), angles.sin()

    rotations = plan_rotations(plan, tables, CUDA)
    check(device, plan, rotations=rotations)


@pytest.mark.parametrize("offload", [False, True])
def test_kept_attention(group, device, offload):
    """Over a checkpoint; offloaded results are copied without waiting."""
    plan = make_plan(windows("anchor"), group, "zigzag", "ring", verify=False)
    tensors = rows(plan)

    def layer(*x):
        return torch.utils.checkpoint.checkpoint(
            lambda *y: distributed_attention(*y, plan) * 2.0,
            *x,
            use_reentrant=False,
            context_fn=lambda: keep_attention(offload),
        )

    torch.autograd.grad(layer(*tensors).sum(), tensors)


def test_a_shard_is_sent_once_and_the_group_warmed_up_on_its_device(group, device, monkeypatch):
    plan = make_plan(windows("anchor"), group, verify=False)
    with device.crossing():
        local = shard(windows("anchor"), plan, device="cuda")
    assert {x.device for x in vars(local).values()} == {CUDA}
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    assert group_device(group) == CUDA
    warm_up(group)


def test_an_index_made_in_every_layer_is_found(group, device, monkeypatch):
    def uncached(rows, device):
        parts = [torch.arange(start, stop) for start, stop in rows.intervals.tolist()]
        return to_device(torch.cat(parts), device)

    monkeypatch.setattr(transfer, "_index", uncached)
    plan = make_plan(windows("anchor"), group, "zigzag", "gather", verify=False)
    with pytest.raises(AssertionError, match="copies"):
        check(device, plan)
