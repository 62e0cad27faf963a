"""``model.compile``: the eager gradients, no graph broken, none compiled anew for other windows."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from anchorcontext import Window, enable, make_plan, shard
from anchorcontext.config.sections import ModelSection
from anchorcontext.model import TrainModel
from anchorcontext.model.compile import compile_layers
from anchorcontext.model.memory import save_memory
from anchorcontext.testing.models import tiny_model

WINDOWS = [(7, 13, 5, 23, 16), (9, 30, 32), (64, 50), (3, 90, 20)]  # 65, 72, 115, 114 tokens


def gradients(compiled):
    """Of each window, under our attention, with the levers that wrap what is compiled."""
    model = enable(tiny_model("llama"))
    levers = {"keep_attention": True, "mlp_chunk_tokens": 48}
    save_memory(model, ModelSection(scratch={"model_type": "llama"}, dtype="fp32", **levers))
    if compiled:
        compile_layers(model)
    model = TrainModel(model).train()
    for number, lengths in enumerate(WINDOWS):
        rng = np.random.default_rng(number)
        documents = [rng.integers(3, 128, size=n) for n in lengths]
        window = Window.from_documents(documents, anchor_id=1, mode="anchor")
        plan = make_plan([window])
        local = shard([window], plan)
        loss, _ = model(local.input_ids, local.position_ids, local.labels, plan)
        loss.backward()
        yield {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")
def test_compiled_gradients_are_the_eager_ones():
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    graphs = []
    for eager, found in zip(gradients(False), gradients(True), strict=True):
        graphs.append(counters["stats"]["unique_graphs"])
        assert found.keys() == eager.keys()
        for name, theirs in eager.items():
            assert (found[name] - theirs).abs().max() <= 1e-5 * theirs.abs().max(), name
    assert graphs[0] > 0 and graphs[-1] == graphs[-2], "more windows, no more graphs"
    assert not counters["graph_break"]
