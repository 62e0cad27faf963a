"""A copy of the anchor in front of every document computes what the shared anchor does."""

import numpy as np
import pytest
import torch

from anchorcontext import Window, enable, make_plan, shard
from anchorcontext.errors import UserError
from anchorcontext.testing.models import stock_logits, stock_loss, tiny_model

LENGTHS = (5, 1, 9, 4)
ANCHOR = 1


def windows(lengths=LENGTHS, seed=0):
    """The same documents behind one anchor, and each behind a copy of it."""
    rng = np.random.default_rng(seed)
    documents = [rng.integers(3, 128, size=n) for n in lengths]
    shared = Window.from_documents(documents, anchor_id=ANCHOR, mode="anchor")
    parts = [part for document in documents for part in ([ANCHOR], document)]
    edges = np.cumsum([0, *map(len, parts)])
    number = 2 * len(lengths)
    copied = Window(
        np.concatenate(parts),
        edges,
        "intra_doc",
        segment_docs=np.arange(number) // 2,
        copies=np.arange(number) % 2 == 0,
    )
    return shared, copied


def test_positions_are_those_of_the_shared_anchor():
    shared, copied = windows((3, 2))
    assert copied.position_ids.tolist() == [0, 1, 2, 3, 0, 4, 5]
    assert copied.position_ids[~copied.anchor_copies].tolist() == shared.position_ids[1:].tolist()
    assert copied.with_mode("full").position_ids.tolist() == list(range(7))
    assert copied.with_mode("intra_doc_reset").position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert copied.prefix(6).position_ids.tolist() == [0, 1, 2, 3, 0, 4]
    assert copied.num_targets == shared.num_targets


def test_a_window_that_begins_with_a_continuation_keeps_the_positions_of_plain_packing():
    window = Window(
        np.arange(6), [0, 2, 3, 6], "intra_doc", segment_docs=[0, 1, 1], copies=[False, True, False]
    )
    assert window.position_ids.tolist() == [0, 1, 0, 2, 3, 4]


def test_logits_loss_and_gradients_are_those_of_the_shared_anchor():
    shared, copied = windows()
    model = tiny_model(dtype=torch.float64)
    own = ~torch.tensor(copied.anchor_copies)
    expected, found = stock_logits(model, shared)[0, 1:], stock_logits(model, copied)[0, own]
    assert (found - expected).abs().max() < 1e-6  # its eager softmax is fp32 in any dtype
    unplaced = Window(
        copied.input_ids, copied.cu_seqlens, "intra_doc", segment_docs=copied.segment_docs
    )
    assert (stock_logits(model, unplaced)[0, own] - expected).abs().max() > 1e-3
    gradients = []
    for window in (shared, copied):
        model.zero_grad()
        stock_loss(model, window).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradients[1][name], gradient, atol=1e-6, rtol=1e-4), name


def test_our_attention_gives_stock_logits_on_copies():
    _, copied = windows()
    expected = stock_logits(tiny_model(), copied)
    model = enable(tiny_model())
    plan = make_plan(copied)
    local = shard(copied, plan)
    found = model(local.input_ids, position_ids=local.position_ids, plan=plan, use_cache=False)
    assert (found.logits - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"copies": [True, False]}, r"copies has shape \(2,\) for 3 runs"),
        ({"copies": [False, False, True]}, "run 2 is a copy of the anchor and has more than one"),
        ({"copies": [False, True, False], "mode": "anchor"}, "in mode 'anchor', which has one"),
    ],
)
def test_impossible_copies_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        Window(np.arange(6), [0, 1, 2, 6], **{"mode": "intra_doc", **changes})


def test_the_loss_mask_can_be_read():
    assert Window(np.arange(3), [0, 3], "full").loss_mask.tolist() == [True] * 3
    mask = [True, False, True]
    assert Window(np.arange(3), [0, 3], "full", loss_mask=mask).loss_mask.tolist() == mask
