"""Loss by position against a stock model, the far context's gain, and any number of SP ranks."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from anchorcontext.data import WindowDataset
from anchorcontext.errors import UserError
from anchorcontext.evaluate.documents import HeldOutDocuments
from anchorcontext.evaluate.positions import (
    check_context,
    position_buckets,
    position_edges,
    position_probes,
    short_probes,
    total_gain,
)
from anchorcontext.evaluate.tally import tally
from anchorcontext.model import TrainModel, enable
from anchorcontext.parallel import build_mesh
from anchorcontext.testing import run_distributed
from anchorcontext.testing.models import tiny_llama

CPU = torch.device("cpu")
EDGES, SHORT, BOS = [0, 8, 16, 32, 60], 16, 1


def documents():
    rng = np.random.default_rng(3)
    return [rng.integers(2, 128, size) for size in (75, 59, 64)]


def both(model, mesh, bos=BOS, texts=None):
    texts = documents() if texts is None else texts
    probes = [position_probes(texts, EDGES, bos), short_probes(texts, EDGES, bos, SHORT)]
    found, short = (tally(model, each, len(EDGES) - 1, mesh, CPU, {}) for each in probes)
    return position_buckets(EDGES, found, short, SHORT)


def stock_token_losses(model, ids):
    """(n - 1,) loss of ids[1:] in a plain causal forward."""
    logits = model(torch.tensor(ids)[None], use_cache=False).logits[0, :-1]
    return F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").numpy()


@torch.no_grad()
@pytest.mark.parametrize("bos", [BOS, None])
def test_equal_to_a_stock_model_on_each_document_and_on_its_last_tokens_alone(bos):
    model = tiny_llama()
    train_model = TrainModel(enable(model))
    found = both(train_model, build_mesh(1), bos)
    model.set_attn_implementation("sdpa")
    front = [] if bos is None else [bos]
    far, near = {}, {}
    for text in documents():
        ids = np.r_[front, text].astype(np.int64)[: EDGES[-1]]
        for position, loss in enumerate(stock_token_losses(model, ids), start=1):
            far.setdefault(position, []).append(loss)
        for first in range(SHORT, len(ids), SHORT // 2):
            stop = min(first + SHORT // 2, len(ids))
            alone = np.r_[front, ids[stop - SHORT + len(front) : stop]].astype(np.int64)
            losses = stock_token_losses(model, alone)
            for position in range(first, stop):
                near.setdefault(position, []).append(losses[position - stop])
    for bucket, start, stop in zip(found, EDGES, EDGES[1:], strict=False):
        losses = [loss for p in range(max(start, 1), stop) for loss in far[p]]
        assert (bucket.start, bucket.stop, bucket.targets) == (start, stop, len(losses))
        assert bucket.loss == pytest.approx(np.mean(losses), rel=1e-6)
        assert bucket.perplexity == pytest.approx(math.exp(bucket.loss))
        if start < SHORT:
            assert bucket.short_loss is bucket.gain is None
            continue
        short = [loss for p in range(start, stop) for loss in near[p]]
        assert bucket.short_loss == pytest.approx(np.mean(short), rel=1e-6)
        assert bucket.gain == pytest.approx(bucket.loss - bucket.short_loss)
        assert abs(bucket.gain) > 1e-4
    beyond = found[2:]
    weighted = sum(b.targets * b.gain for b in beyond) / sum(b.targets for b in beyond)
    assert total_gain(found) == pytest.approx(weighted)


def on_ranks(rank, world_size, sp):
    from anchorcontext.parallel import build_mesh

    return both(TrainModel(enable(tiny_llama())), build_mesh(sp))


def test_equal_for_every_sp_within_1e_5():
    alone, *others = (run_distributed(on_ranks, sp, sp)[0] for sp in (1, 2, 4))
    assert [bucket.targets for bucket in alone] == [21, 24, 48, 84]
    for found in others:
        for one, other in zip(alone, found, strict=True):
            assert (one.start, one.stop, one.targets) == (other.start, other.stop, other.targets)
            for name in ("loss", "perplexity", "short_loss", "gain"):
                assert getattr(other, name) == pytest.approx(getattr(one, name), abs=1e-5)


def test_4096_tokens_over_two_ranks_in_the_usual_ranges():
    def loss(rank, world_size, sp):
        text = [np.random.default_rng(0).integers(2, 128, 4096)]
        edges = position_edges(4096)
        probes = position_probes(text, edges, BOS)
        model = TrainModel(enable(tiny_llama(num_hidden_layers=1)))
        found = tally(model, probes, len(edges) - 1, build_mesh(sp), CPU, {})
        return [(b.start, b.stop, b.loss) for b in position_buckets(edges, found)]

    (alone,), shared = run_distributed(loss, 1, 1), run_distributed(loss, 2, 2)
    assert shared[0] == shared[1]
    assert [row[:2] for row in alone] == [(0, 1024), (1024, 2048), (2048, 4096)]
    for one, other in zip(alone, shared[0], strict=True):
        assert other == pytest.approx(one, abs=1e-5)


def test_held_out_documents_are_whole_again(prepared, held_out_texts):
    held_out = HeldOutDocuments(WindowDataset(prepared, "validation"))
    texts = held_out_texts
    assert held_out.lengths == {number: len(ids) for number, ids in texts.items()}
    for number, ids in texts.items():
        assert np.array_equal(held_out.tokens(number), ids)
        assert np.array_equal(held_out.tokens(number, 17), ids[:17])
    long = held_out.long_ones(40, count=2)
    assert [len(ids) for ids in long] == [40, 40]
    assert np.array_equal(long[1], texts[6][:40])
    assert held_out.longest == 90
    assert np.array_equal(held_out.text(100), np.r_[texts[4], texts[5]])


def test_ranges_and_what_a_short_context_may_be():
    assert position_edges(131072) == [0, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072]
    assert position_edges(1000) == [0, 1000]
    check_context(4096, position_edges(8192))
    with pytest.raises(UserError, match=r"--short 4096: .* one of 1024, 2048"):
        check_context(4096, position_edges(4096))
    with pytest.raises(UserError, match=r"--short 128: the 512 positions .* leave it out"):
        check_context(128, position_edges(512))
