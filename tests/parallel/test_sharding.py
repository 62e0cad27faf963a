"""Shards, agreement between ranks, meshes and groups of any shape."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from anchorcontext import UserError, Window, distributed_attention, make_plan, shard, unshard
from anchorcontext.testing import run_distributed


def window_of(length, offset=0):
    return Window(np.arange(length) + offset, [0, 1, length] if length > 1 else [0, 1], "anchor")


def check_shards(rank, world, layout):
    import torch.distributed as dist

    for length in (1, 5, 16, 30):
        windows = [window_of(length), window_of(max(1, length - 3), offset=100)]
        plan = make_plan(windows, dist.group.WORLD, layout)
        local = shard(windows, plan)
        for name in ("input_ids", "position_ids", "labels", "doc_ids"):
            assert getattr(local, name).shape == (2, plan.local_length), name
            whole = unshard(getattr(local, name), plan)
            for b, window in enumerate(windows):
                n = window.num_tokens
                assert whole[b, :n].tolist() == getattr(window, name).tolist(), (length, name)
        padding = local.doc_ids == -1
        assert (local.labels[padding] == -100).all() and (local.input_ids[padding] == 0).all()
    return True


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_shards_hold_the_whole_windows_ids_positions_and_labels(world, layout):
    """Hazards 1, 14, 26: nothing is renumbered or shifted inside a shard."""
    assert all(run_distributed(check_shards, world, layout))


def test_labels_of_one_document_over_four_ranks_lose_no_target():
    """Hazard 1: 16 tokens, 15 targets, each the next token."""
    window = Window(np.arange(16), [0, 16], "full")
    assert window.num_targets == 15
    assert window.labels[:-1].tolist() == list(range(1, 16))


def test_targets_at_document_boundaries():
    """Hazards 2 and 13: [5, 3, 4] has 9 targets, 11 when boundaries are trained."""
    window = Window(np.arange(12), [0, 5, 8, 12], "intra_doc")
    assert window.num_targets == 9
    assert Window(np.arange(12), [0, 5, 8, 12], "intra_doc", boundary="train").num_targets == 11
    anchored = Window.from_documents([range(5), range(3), range(4)], anchor_id=99)
    assert anchored.num_targets == 9, "the anchor, a document of one token, has no target"


def disagree(rank, world, kind):
    import torch.distributed as dist

    window = window_of(16 + rank) if kind == "length" else window_of(16, offset=rank)
    try:
        make_plan(window, dist.group.WORLD)
    except UserError as error:
        return str(error)
    return None


def test_ranks_that_disagree_are_told_both_values_on_every_rank():
    """Hazard 18."""
    messages = run_distributed(disagree, 2, "length")
    assert messages[0] == messages[1] and "[16, 17]" in messages[0]
    messages = run_distributed(disagree, 3, "tokens")
    assert len(set(messages)) == 1 and "SP ranks [1, 2]" in messages[0]


def check_groups(rank, world, group_ranks):
    import torch.distributed as dist

    groups = [dist.new_group(ranks) for ranks in group_ranks]
    mine = next(i for i, ranks in enumerate(group_ranks) if rank in ranks)
    torch.manual_seed(mine)
    window = Window.from_documents([range(7 + mine), range(13), range(5)], anchor_id=0)
    plan = make_plan(window, groups[mine])
    alone = make_plan(window, None)
    whole = torch.randn(3, 1, 4, plan.padded_length, 8, dtype=torch.float64)
    rows = torch.from_numpy(plan.data.local_indices(plan.sp_rank, 0))
    out = unshard(distributed_attention(*whole[:, :, :, rows].clone(), plan).transpose(1, 2), plan)
    expected = distributed_attention(*whole[:, :, :, : window.num_tokens].clone(), alone)
    torch.testing.assert_close(out.transpose(1, 2), expected, rtol=0, atol=1e-12)
    return True


@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0, 2], [1, 3]]], ids=["blocks", "strided"])
def test_groups_of_any_ranks_work_side_by_side(groups):
    """Hazards 6 and 20: world 4, another window in each SP group."""
    assert all(run_distributed(check_groups, 4, groups))


def check_mesh(rank, world, sp):
    from anchorcontext.parallel import build_mesh

    mesh = build_mesh(sp)
    return mesh.dp_rank, mesh.sp_rank, mesh.sp_group and mesh.sp_group.size()


def test_mesh_places_sp_ranks_next_to_each_other():
    assert run_distributed(check_mesh, 4, 2) == [
        (0, 0, 2),
        (0, 1, 2),
        (1, 0, 2),
        (1, 1, 2),
    ]
    assert run_distributed(check_mesh, 2, 1) == [(0, 0, None), (1, 0, None)]
    with pytest.raises(RuntimeError, match=r"parallel.sp = 3 with 4 ranks: .* one of \[1, 2, 4\]"):
        run_distributed(check_mesh, 4, 3)


def test_shard_refuses_windows_that_the_plan_would_mask_wrongly():
    window = Window.from_documents([range(7), range(9)], anchor_id=0)
    plan = make_plan(window)
    shard(Window(window.input_ids + 1, window.cu_seqlens), plan)  # other tokens are no matter
    for other in (
        Window.from_documents([range(8), range(8)], anchor_id=0),
        window.with_mode("intra_doc"),
        [window, window],
    ):
        with pytest.raises(UserError, match="shard the windows the plan was made for"):
            shard(other, plan)


def test_attention_refuses_tensors_that_do_not_fit():
    plan = make_plan(window_of(16))
    q, k = torch.zeros(1, 4, 16, 8), torch.zeros(1, 2, 16, 8)
    with pytest.raises(UserError, match="key/value heads must divide"):
        distributed_attention(q, k[:, :1].expand(1, 3, 16, 8), k[:, :1].expand(1, 3, 16, 8), plan)
    with pytest.raises(UserError, match="16 tokens a rank"):
        distributed_attention(q[:, :, :8], k[:, :, :8], k[:, :, :8], plan)
    with pytest.raises(UserError, match="share dtype"):
        distributed_attention(q.double(), k, k, plan)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2, 3], [0, 2]), r"cu_seqlens = \[0, 2\] for 3 tokens"),
        (([1, 2, 3], [0, 1, 1, 3]), "run 1 from 1 to 1 is empty"),
        (([], [0]), "input_ids is empty"),
        (([1.5, 2.0], [0, 2]), "give a vector of integers"),
        (([1, 2, 3], [0, 3]), "token 0 is the anchor"),
        (([1, 2, 3], [0, 1, 3], "anchors"), "did you mean 'anchor'"),
    ],
)
def test_a_window_that_is_not_one_is_refused_with_the_fix(arguments, message):
    with pytest.raises(UserError, match=message):
        Window(*arguments)
