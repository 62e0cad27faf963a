"""Exchanges under NCCL's rules: messages match by order, and a rank runs its batches one by one.

All batched messages of a group share one NCCL communicator and one stream, so a rank begins a batch
when the one before has ended, and a batch ends when each of its messages has met the other end's
(NCCL user guide, "Group calls" and "Point-to-point communication"). Gloo forgives what this rule
does not. Here every rank of a group runs in this process; what it posts is recorded, no byte moves,
and a scheduler then runs the recorded batches by that rule. Waiting at every batch is stricter than
a GPU, whose streams wait where ``wait`` was called: what ends here ends there.

NCCL cuts a batch of some hundreds of messages into kernels that run one by one, on each rank where
its own budget ends (NVIDIA/Megatron-LM pull request 7189, pytorch issue 174288), and then the rule
does not hold. One message a pair and direction keeps batches small: 126 at most on 64 ranks.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from anchorcontext import Window, distributed_attention
from anchorcontext.parallel.plan import Plan
from anchorcontext.parallel.transfer import Peers
from anchorcontext.plan import BatchPlan

MODES = ("full", "intra_doc", "anchor")  # intra_doc_reset travels as intra_doc does
LAYOUTS = ("contiguous", "zigzag", "balanced")
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 2
DOCUMENTS = (
    (7, 13, 5, 23, 16),
    (1, 30, 1),
    (31,),
    (4, 12, 16, 1, 1, 1),
    (2, 1),  # ranks without any token
    (1,) * 32,  # nothing travels but anchors
)
EXCHANGES = {
    "ring": {"exchange": "ring"},
    "gather": {"exchange": "gather"},
    "exact": {"exchange": "gather", "exact": True},
    "ulysses": {"exchange": "ulysses"},
    "teams of 2, ring": {"exchange": "ring", "ulysses": 2},
    "teams of 2, gather": {"exchange": "gather", "ulysses": 2},
}


class Op(NamedTuple):
    """One message's end at this rank."""

    kind: str
    peer: int
    num_bytes: int


Batch = list[Op]
Program = list[Batch]
"""What one rank posts, in order."""


class Idle:
    """An engine that computes nothing: messages do not depend on values."""

    name, exact, takes_anchors, takes_rotation = "idle", True, True, False

    def forward(self, *_, **__):
        pass

    backward = forward


@pytest.fixture
def posted(monkeypatch):
    """The batches that the calls of this process post; nothing is sent."""
    batches: Program = []

    def operation(peers, call, tensor, peer):
        return Op(call.__name__, peers.ranks[peer], tensor.numel() * tensor.element_size())

    class Done:
        def wait(self):
            pass

    def post(batch):
        batches.append(batch)
        return [Done()]

    monkeypatch.setattr(Peers, "operation", operation)
    monkeypatch.setattr(dist, "batch_isend_irecv", post)
    return batches


def plan_of(monkeypatch, data, rank, overlap):
    """The plan of one rank of a group that does not exist."""
    group = object()
    monkeypatch.setattr(dist, "get_rank", lambda of: rank if of is group else 0)
    plan = Plan(data, group, overlap=overlap)
    plan._engines[torch.device("cpu"), torch.float32] = Idle()
    return plan


def run_layer(plan):
    """A forward and a backward. Layers and recomputations only put such sequences in a row."""
    batch, length = plan.batch_size, plan.local_length
    q, k, v = (torch.zeros(batch, h, length, HEAD_DIM) for h in (HEADS, KV_HEADS, KV_HEADS))
    distributed_attention(*(x.requires_grad_() for x in (q, k, v)), plan).sum().backward()


def unmatched(programs: list[Program]) -> str | None:
    """Where two ranks' messages to each other differ in number or size; None where none do."""
    sent, received = defaultdict(list), defaultdict(list)
    for rank, program in enumerate(programs):
        for op in itertools.chain.from_iterable(program):
            if op.kind == "isend":
                sent[rank, op.peer].append(op.num_bytes)
            else:
                received[op.peer, rank].append(op.num_bytes)
    for ends in {*sent, *received}:
        if sent[ends] != received[ends]:
            return f"{ends[0]} -> {ends[1]}: sent {sent[ends]}, expected {received[ends]}"
    return None


def blocked(programs: list[Program]) -> dict[int, Batch]:
    """Run every rank's batches in order; the ranks that never end, and what they wait for."""
    place = [0] * len(programs)
    open_ops = [set(program[0]) if program else set() for program in programs]
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(open_ops):
            for op in list(ops):
                kind = "irecv" if op.kind == "isend" else "isend"
                other = Op(kind, rank, op.num_bytes)
                if other in open_ops[op.peer]:
                    ops.remove(op)
                    open_ops[op.peer].remove(other)
                    moved = True
        for rank, program in enumerate(programs):
            if not open_ops[rank] and place[rank] < len(program):
                place[rank] += 1
                open_ops[rank] = set(program[place[rank]]) if place[rank] < len(program) else set()
                moved = True
    return {rank: sorted(ops) for rank, ops in enumerate(open_ops) if ops}


def windows_of(lengths, mode):
    documents = [np.arange(n) for n in lengths]
    return Window.from_documents(documents, anchor_id=0 if mode == "anchor" else None, mode=mode)


def micro_batches():
    """Each document set in each mode, and windows of different modes together."""
    for lengths, mode in itertools.product(DOCUMENTS, MODES):
        yield [windows_of(lengths, mode)]
    yield [windows_of(lengths, mode) for lengths, mode in zip(DOCUMENTS, MODES * 2, strict=True)]


def programs_of(monkeypatch, posted, data, overlap=True):
    """What each rank posts for one layer."""
    programs = []
    for rank in range(data.sp_size):
        run_layer(plan_of(monkeypatch, data, rank, overlap))
        programs.append(list(posted))
        posted.clear()
    return programs


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *itertools.product(("ring", "gather"), (2, 3, 5)),
        *itertools.product(("exact",), (2, 3)),
        *itertools.product(("ulysses",), (2, 4)),
        *itertools.product(("teams of 2, ring", "teams of 2, gather"), (4, 6)),
    ],
)
def test_every_message_meets_its_other_end_and_no_rank_waits_for_ever(
    name, ranks, posted, monkeypatch
):
    busy = 0
    for windows, layout in itertools.product(micro_batches(), LAYOUTS):
        data = BatchPlan(windows, ranks, layout, **EXCHANGES[name])
        programs = programs_of(monkeypatch, posted, data)
        case = f"{layout}, {[(w.mode.name, w.num_tokens) for w in windows]}"
        assert unmatched(programs) is None, case
        assert blocked(programs) == {}, case
        ends = [[op[:2] for op in batch] for program in programs for batch in program]
        assert all(len(set(batch)) == len(batch) for batch in ends), "one message a direction"
        busy += any(programs)
    assert busy > 20, "most micro-batches have something to send"


def test_without_overlap_the_same_is_posted(posted, monkeypatch):
    for windows, layout in itertools.product(micro_batches(), LAYOUTS):
        data = BatchPlan(windows, 4, layout, exchange="ring")
        with_overlap, without = (
            programs_of(monkeypatch, posted, data, overlap) for overlap in (True, False)
        )
        assert with_overlap == without


def send(peer, num_bytes=8):
    return Op("isend", peer, num_bytes)


def receive(peer, num_bytes=8):
    return Op("irecv", peer, num_bytes)


def test_the_scheduler_tells_a_deadlock_from_an_exchange():
    swap = [[[send(1), receive(1)]], [[receive(0), send(0)]]]
    assert unmatched(swap) is None
    assert blocked(swap) == {}
    one_by_one = [[[send(1)], [receive(1)]], [[send(0)], [receive(0)]]]
    assert unmatched(one_by_one) is None, "by pairs alone nothing is wrong"
    assert set(blocked(one_by_one)) == {0, 1}
    in_a_circle = [[[send(1)], [send(2)]], [[receive(2)], [receive(0)]], [[receive(0)], [send(1)]]]
    assert unmatched(in_a_circle) is None
    assert set(blocked(in_a_circle)) == {0, 1, 2}
    assert unmatched([[[send(1, 16)]], [[receive(0, 8)]]]) == "0 -> 1: sent [16], expected [8]"


def test_a_rank_that_posts_two_exchanges_in_another_order_is_found(posted, monkeypatch):
    data = BatchPlan([windows_of((64,), "anchor")], 4, "zigzag", exchange="ring")
    programs = programs_of(monkeypatch, posted, data)
    assert blocked(programs) == {}
    programs[1][2], programs[1][3] = programs[1][3], programs[1][2]
    assert blocked(programs) or unmatched(programs)
