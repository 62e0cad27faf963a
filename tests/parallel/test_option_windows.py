"""Windows with tags, interleaved pieces and copies of the anchor, across ranks: stock's numbers."""

from __future__ import annotations

import pytest

from anchorcontext.testing import run_distributed


def make_windows():
    """A window of every option, by the code that ``prepare`` uses: {name: (window, mode)}."""
    import numpy as np

    from anchorcontext.data.assemble import window_records
    from anchorcontext.data.fronts import Fronts
    from anchorcontext.data.interleave import interleave
    from anchorcontext.data.packing import pack

    rng = np.random.default_rng(0)
    lengths = np.array([9, 14, 3, 20, 7])

    ids_of = [rng.integers(3, 128, n).astype(np.int32) for n in lengths]

    class Corpus:
        sources = np.array([0, 1, 0, 1, 0])

        def ids(self, document, start, length):
            return ids_of[document][start : start + length]

    def window(copies, tags, mode):
        fronts = Fronts(copies, tags)
        first, again = fronts.num_tokens(Corpus.sources)
        anchor = copies == "none"
        packing = pack(lengths, 96, anchor=anchor, method="best_fit", first=first, again=again)
        segments = interleave(packing.segments, tokens=(5, 15), seed=4)
        packing = type(packing)(segments, 96, anchor)
        (record,) = window_records(packing, np.arange(5), Corpus(), 1, fronts)
        assert len(record.documents) > 8  # some are in pieces
        return record.window(mode)

    tags = [np.array([5, 6], dtype=np.int32), np.array([7, 8, 9], dtype=np.int32)]
    return {
        "anchor, tags, pieces": window("none", tags, "anchor"),
        "copies, pieces": window("documents", [], "intra_doc"),
        "copies, tags, pieces, reset": window("segments", tags, "intra_doc_reset"),
    }


def check(rank, world, layout, exchange):
    import torch
    import torch.distributed as dist

    from anchorcontext import enable, make_plan, shard, unshard
    from anchorcontext.model import TrainModel
    from anchorcontext.testing.models import stock_logits, stock_loss, tiny_model

    for name, window in make_windows().items():
        stock = tiny_model()
        expected = stock_logits(stock, window)[0]
        (stock_loss(stock, window) / window.num_targets).backward()

        model = tiny_model()
        trained = TrainModel(enable(model), chunk_tokens=8)
        plan = make_plan(window, dist.group.WORLD, layout, exchange)
        local = shard(window, plan)
        loss, targets = trained(local.input_ids, local.position_ids, local.labels, plan)
        loss.backward()
        dist.all_reduce(targets)
        assert int(targets) == window.num_targets, name
        with torch.no_grad():
            logits = model(
                local.input_ids, position_ids=local.position_ids, plan=plan, use_cache=False
            ).logits
        found = unshard(logits, plan)[0, : window.num_tokens]
        assert (found - expected).abs().max() < 1e-5, name
        for parameter, reference in zip(model.parameters(), stock.parameters(), strict=True):
            dist.all_reduce(parameter.grad)
            gradient, want = parameter.grad / window.num_targets, reference.grad
            assert ((gradient - want).abs() <= 1e-6 + 1e-4 * want.abs()).all(), name


@pytest.mark.parametrize(("layout", "exchange"), [("balanced", "gather"), ("zigzag", "ring")])
def test_two_ranks_equal_stock_transformers(layout, exchange):
    run_distributed(check, 2, layout, exchange)
