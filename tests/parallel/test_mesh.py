"""What the mesh asks of NCCL, which no CPU has."""

from types import SimpleNamespace

import torch.distributed as dist

from anchorcontext.parallel import build_mesh, mesh


def build(monkeypatch, backend, sp):
    """The groups that rank 5 of 8 makes, with their options, and those it warms up."""
    made, warm = [], []
    options = SimpleNamespace(Options=lambda **chosen: chosen)

    def new_group(ranks, pg_options=None):
        made.append((ranks, pg_options))
        return tuple(ranks)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", options, raising=False)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(mesh, "warm_up", warm.append)
    assert build_mesh(sp).sp_group == (warm[0] if warm else None)
    return made, warm


def test_nccl_groups_go_before_waiting_attention_and_are_warm(monkeypatch):
    made, warm = build(monkeypatch, "nccl", sp=4)
    first = {"is_high_priority_stream": True}
    assert made == [([0, 1, 2, 3], first), ([4, 5, 6, 7], first)]
    assert warm == [(4, 5, 6, 7)]


def test_gloo_groups_have_no_options_and_no_group_has_one_member(monkeypatch):
    made, _ = build(monkeypatch, "gloo", sp=8)
    assert made == [(list(range(8)), None)]
    assert build(monkeypatch, "nccl", sp=1) == ([], [])
