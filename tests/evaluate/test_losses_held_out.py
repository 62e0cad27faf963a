"""Held-out loss: the same targets at every context length, equal for every (dp, sp) and ZeRO-3.

The oracle is stock transformers with an explicit mask: documents cut every C tokens.
"""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from anchorcontext.data import WindowDataset
from anchorcontext.errors import UserError
from anchorcontext.evaluate.loss import held_out_losses, held_out_probes, limit_context
from anchorcontext.evaluate.tally import tally
from anchorcontext.model import TrainModel, build_model
from anchorcontext.parallel import build_mesh
from anchorcontext.testing import run_distributed
from anchorcontext.train.costs import plan_options
from anchorcontext.train.engine import build_engine
from anchorcontext.window import Window

CPU = torch.device("cpu")
LENGTHS = (8, 24, 64)


def model_of(config):
    return build_model(config.model, window_tokens=64, seed=0, vocab_size=128, probe=False)


def anchored(record):
    return record.window("anchor")


def stock_losses(model, window, mask, positions):
    """(L,) loss of each token's own target; 0 without one."""
    bias = torch.zeros(mask.shape).masked_fill(~mask, -1e30)[None, None]
    logits = model(
        torch.tensor(window.input_ids)[None],
        position_ids=torch.tensor(positions)[None],
        attention_mask=bias,
        use_cache=False,
    ).logits[0]
    return F.cross_entropy(logits, torch.tensor(window.labels), reduction="none")


def cut_mask(documents, length, anchor):
    """Token i sees j <= i of its document and of the same run of ``length`` of its tokens."""
    seen = {}
    piece = [seen.setdefault(d, []).append(0) or (len(seen[d]) - 1) // length for d in documents]
    size = len(documents)
    same = [
        [
            j <= i and ((documents[i], piece[i]) == (documents[j], piece[j]) or (anchor and j == 0))
            for j in range(size)
        ]
        for i in range(size)
    ]
    return torch.tensor(same)


@pytest.mark.parametrize("mode", ["anchor", "intra_doc", "full"])
@torch.no_grad()
def test_equal_to_a_stock_model_that_sees_so_much(prepared, tiny, mode):
    dataset = WindowDataset(prepared, "validation")
    model = model_of(tiny())
    probes = held_out_probes(dataset, LENGTHS, lambda record: record.window(mode))
    found = tally(TrainModel(model), probes, 3, build_mesh(1), CPU, {})
    model.set_attn_implementation("sdpa")
    for group, length in enumerate(LENGTHS):
        total, targets = 0.0, 0
        for record in dataset:
            window = record.window(mode)
            documents = [0] * len(window.doc_ids) if mode == "full" else window.doc_ids.tolist()
            mask = cut_mask(documents, length, anchor=mode == "anchor")
            positions = np.arange(window.num_tokens)
            total += float(stock_losses(model, window, mask, positions).sum())
            targets += window.num_targets
        assert found.targets[group] == targets
        assert found.loss[group] == pytest.approx(total, rel=1e-6)
    # More context changes the loss of the same targets.
    assert len({round(loss, 6) for loss in found.loss}) == 3


def test_targets_stay_those_of_the_window_whatever_is_cut():
    rng = np.random.default_rng(0)
    pieces = Window(  # document 1 in two pieces, a tag's tokens masked
        np.r_[0, rng.integers(1, 99, 40)],
        [0, 1, 14, 27, 41],
        "anchor",
        segment_docs=[0, 1, 2, 1],
        loss_mask=np.r_[[True] * 14, [False] * 4, [True] * 23],
    )
    for boundary in ("mask", "train"):
        window = Window(
            pieces.input_ids,
            pieces.cu_seqlens,
            "anchor",
            segment_docs=pieces.segment_docs,
            boundary=boundary,
            loss_mask=pieces.loss_mask,
        )
        for length in (2, 5, 13, 20, 40):
            cut = limit_context(window, length)
            assert np.array_equal(cut.labels, window.labels)
            assert np.array_equal(cut.position_ids, window.position_ids)
            assert max(np.bincount(cut.doc_ids)) <= length
    # The second piece of document 1 goes on where the first one's count ended: 13 + 7 tokens.
    cut = limit_context(pieces, 20)
    assert cut.cu_seqlens.tolist() == [0, 1, 14, 27, 34, 41]
    assert cut.segment_docs[1] == cut.segment_docs[3] != cut.segment_docs[4]


def test_copies_of_the_anchor_stay_copies():
    ids = np.r_[0, np.arange(1, 10), 0, np.arange(1, 6)]
    copies = [True, False, True, False]
    window = Window(ids, [0, 1, 10, 11, 16], "intra_doc", segment_docs=[0, 0, 1, 1], copies=copies)
    cut = limit_context(window, 4)
    assert np.array_equal(cut.anchor_copies, window.anchor_copies)
    assert np.array_equal(cut.labels, window.labels)
    assert np.array_equal(cut.position_ids, window.position_ids)


def test_lengths_that_windows_do_not_have_are_refused(prepared):
    dataset = WindowDataset(prepared, "validation")
    for length in (1, 65):
        with pytest.raises(UserError, match=rf"context of {length} tokens.* from 2 to 64"):
            held_out_probes(dataset, [length], anchored)


def without_training(module, arguments):
    assert not any(part.training for part in module.modules()) and not torch.is_grad_enabled()


def everywhere(rank, world_size, sp, config):
    """The loss of 1 to 4 windows on this mesh, plain and (on 4 ranks) on a live ZeRO-3 engine."""
    mesh = build_mesh(sp)
    dataset = WindowDataset(config.data.path, "validation")
    options = plan_options(config.attention, None)
    models = [TrainModel(model_of(config))]
    if world_size == 4:
        models.append(build_engine(TrainModel(model_of(config)), config, CPU).module)
    found = []
    for model in models:
        model.register_forward_pre_hook(without_training)
        model.loss_of.train()
        model.causal_lm.get_decoder().layers[0].eval()
        for count in (1, 3, 4):
            probes = held_out_probes(dataset, LENGTHS, anchored, count)
            before = torch.get_rng_state(), random.getstate()
            sums = tally(model, probes, 3, mesh, CPU, options)
            after = torch.get_rng_state(), random.getstate()
            assert torch.equal(before[0], after[0]) and before[1] == after[1]
            found.append((held_out_losses(sums, LENGTHS), sums.targets.tolist()))
        assert model.loss_of.training and not model.causal_lm.get_decoder().layers[0].training
    return found


@pytest.fixture(scope="module")
def alone(prepared):
    return {}


@pytest.mark.parametrize(("dp", "sp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_equal_on_every_mesh_and_for_counts_that_do_not_divide(tiny, alone, dp, sp):
    config = tiny(parallel={"sp": sp}, train={"zero_stage": 3})
    ranks = run_distributed(everywhere, dp * sp, sp, config)
    assert all(found == ranks[0] for found in ranks)
    expected = alone.setdefault("found", ranks[0][:3])  # (1, 1) comes first
    assert len(ranks[0]) == (6 if dp * sp == 4 else 3)
    for index, (losses, targets) in enumerate(ranks[0]):
        true_losses, true_targets = expected[index % 3]
        assert targets == true_targets
        assert losses == pytest.approx(true_losses, rel=1e-6)
