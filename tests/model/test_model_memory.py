"""Memory levers: the same gradients, less kept, attention neither computed nor sent again."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from anchorcontext import Window, enable, make_plan, shard
from anchorcontext.config.sections import ModelSection
from anchorcontext.errors import UserError
from anchorcontext.estimate.links import layer_bytes, row_traffic
from anchorcontext.estimate.memory import layer_activation_bytes
from anchorcontext.kernels import get_engine
from anchorcontext.model import TrainModel
from anchorcontext.model.memory import save_memory
from anchorcontext.parallel import keep
from anchorcontext.plan import BatchPlan
from anchorcontext.testing import run_distributed
from anchorcontext.testing.models import tiny_config, tiny_model
from anchorcontext.train.costs import passes_of
from anchorcontext.watch.sizes import model_sizes

PLAIN = {"gradient_checkpointing": False}
EXACT = [  # nothing is rounded differently
    {},
    {"checkpoint_every": 2},
    {"keep_attention": True},
    {"keep_attention": True, "checkpoint_every": 2},
    {"offload_activations": True},
    {"keep_attention": True, "offload_activations": True},
]
CHUNKED = [
    {"mlp_chunk_tokens": 7},
    {"mlp_chunk_tokens": 1000},
    {"mlp_chunk_tokens": 7, "keep_attention": True},
    {"mlp_chunk_tokens": 7, **PLAIN},
]


def section(**levers):
    return ModelSection(scratch={"model_type": "llama"}, dtype="fp32", **levers)


def make_window():
    rng = np.random.default_rng(0)
    documents = [rng.integers(3, 128, size=n) for n in (7, 13, 5, 23, 16)]
    return Window.from_documents(documents, anchor_id=1, mode="anchor")


def make_model(levers, model_type="llama", dtype=torch.float32, layers=3):
    model = enable(tiny_model(model_type, dtype=dtype, num_hidden_layers=layers))
    save_memory(model, section(**levers))
    return TrainModel(model).train()


def gradients(model, group=None, options=None):
    """Loss, gradients by name, and the plan, of one forward and backward."""
    window = make_window()
    plan = make_plan([window], group, **(options or {}))
    local = shard([window], plan)
    loss, _ = model(local.input_ids, local.position_ids, local.labels, plan)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), found, plan


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_plain_ones_bit_for_bit(model_type, dtype):
    expected_loss, expected, _ = gradients(make_model(PLAIN, model_type, dtype))
    for levers in EXACT:
        model = make_model(levers, model_type, dtype)
        for _ in range(2):
            loss, found, _ = gradients(model)
            assert torch.equal(loss, expected_loss)
            assert found.keys() == expected.keys()
            for name, theirs in expected.items():
                assert torch.equal(found[name], theirs), (levers, name)


@pytest.mark.parametrize("levers", CHUNKED, ids=str)
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_chunked_mlp_has_the_same_parameters_and_gradients(model_type, levers):
    expected_loss, expected, _ = gradients(make_model(PLAIN, model_type, torch.float64))
    loss, found, _ = gradients(make_model(levers, model_type, torch.float64))
    assert loss == pytest.approx(float(expected_loss), rel=1e-12)
    assert found.keys() == expected.keys()
    for name, theirs in expected.items():
        assert torch.allclose(found[name], theirs, rtol=1e-9, atol=1e-12), name


def test_an_mlp_that_is_not_linear_maps_alone_is_refused():
    model = enable(tiny_model("llama"))
    model.model.layers[1].mlp.scale = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(UserError, match=r"mlp_chunk_tokens = 8: layer 1 .* no MLP made of linear"):
        save_memory(model, section(mlp_chunk_tokens=8))


def test_only_every_nth_layer_is_recomputed(monkeypatch):
    calls = count_forwards(monkeypatch)
    for every, recomputed in ((1, 3), (2, 2), (3, 1), (4, 1)):
        calls.clear()
        gradients(make_model({"checkpoint_every": every}))
        assert len(calls) == 3 + recomputed


def test_kept_attention_is_not_computed_again(monkeypatch):
    calls = count_forwards(monkeypatch)
    model = make_model({"keep_attention": True})
    for _ in range(3):
        calls.clear()
        gradients(model)
        assert len(calls) == 3


def count_forwards(monkeypatch):
    """Every forward of the engine, through its class."""
    engine = type(get_engine("auto", device=torch.device("cpu"), dtype=torch.float32))
    calls, forward = [], engine.forward

    def counted(self, *args, **kwargs):
        calls.append(1)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(engine, "forward", counted)
    return calls


def test_nothing_is_kept_after_backward_nor_without_gradients(monkeypatch):
    alive = []
    add = keep._Forward.add

    def watched(self, out, lse):
        add(self, out, lse)
        alive.extend(weakref.ref(x) for x in self._kept[-1])

    monkeypatch.setattr(keep._Forward, "add", watched)
    model = make_model({"keep_attention": True})
    gc.disable()  # freed by backward itself, not by the collector of cycles
    try:
        gradients(model)
        assert len(alive) == 2 * 3 and not any(ref() is not None for ref in alive)
        plan = make_plan([make_window()])
        local = shard([make_window()], plan)
        with torch.no_grad():
            model(local.input_ids, local.position_ids, local.labels, plan)
        assert len(alive) == 2 * 3
        loss = model(local.input_ids, local.position_ids, local.labels, plan)
        assert sum(ref() is not None for ref in alive) == 2 * 3
        del loss  # a forward whose backward never comes
        assert not any(ref() is not None for ref in alive)
    finally:
        gc.enable()


def test_a_retained_graph_is_recomputed_again():
    model = make_model({"keep_attention": True})
    window = make_window()
    plan = make_plan([window])
    local = shard([window], plan)
    hidden = model.hidden_states(local.input_ids, local.position_ids, plan).sum()
    hidden.backward(retain_graph=True)
    first = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    hidden.backward()
    for name, theirs in first.items():
        assert torch.equal(model.get_parameter(name).grad, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", [False, True])
def test_a_checkpointed_layer_keeps_what_the_estimate_says(attention, dtype, monkeypatch):
    """The difference of a model of three layers and one of two, to the byte."""
    levers = {"keep_attention": attention}
    kept = [kept_bytes(monkeypatch, levers, dtype, layers) for layers in (2, 3)]
    sizes, e, tokens = model_sizes(tiny_config()), dtype.itemsize, make_window().num_tokens
    results = sizes.num_heads * (e * sizes.head_dim + 4) if attention else 0
    assert kept[1] - kept[0] == tokens * (sizes.hidden_size * e + results)


def test_a_chunked_layer_keeps_no_intermediate(monkeypatch):
    levers = {"mlp_chunk_tokens": 8, **PLAIN}
    kept = [kept_bytes(monkeypatch, levers, torch.float32, layers) for layers in (2, 3)]
    sizes, tokens = model_sizes(tiny_config()), make_window().num_tokens
    whole = layer_activation_bytes(sizes, 4) - 4 * 4 * sizes.intermediate_size
    assert kept[1] - kept[0] == tokens * whole


def kept_bytes(monkeypatch, levers, dtype, layers):
    """What autograd and our contexts keep from forward to backward, parameters left out."""
    model = make_model(levers, dtype=dtype, layers=layers)
    window = make_window()
    plan = make_plan([window])
    local = shard([window], plan)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def see(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with monkeypatch.context() as patch:
        add = keep._Forward.add
        patch.setattr(keep._Forward, "add", lambda self, *xs: add(self, *map(see, xs)))
        with torch.autograd.graph.saved_tensors_hooks(see, lambda x: x):
            model.hidden_states(local.input_ids, local.position_ids, plan)
    return sum(kept.values())


DISTRIBUTED = [PLAIN, {"keep_attention": True}, {"checkpoint_every": 2}]


def distributed(rank, world, exchange, ulysses):
    import torch.distributed as dist

    options = {"layout": "zigzag", "exchange": exchange, "ulysses": ulysses}
    results = []
    for levers in DISTRIBUTED:
        _, found, plan = gradients(make_model(levers), dist.group.WORLD, options)
        results.append((found, plan.meter.bytes_sent))
    return results


@pytest.mark.parametrize(("exchange", "ulysses"), [("ring", 1), ("gather", 2), ("ulysses", 1)])
def test_ranks_send_what_is_predicted_and_gradients_stay(exchange, ulysses):
    world = 4 if ulysses > 1 else 2
    sizes = model_sizes(tiny_config(num_hidden_layers=3))
    plan = BatchPlan([make_window()], world, "zigzag", exchange, ulysses)
    shape = {
        "num_heads": sizes.num_heads,
        "num_kv_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "element_size": 4,
    }
    ranks = run_distributed(distributed, world, exchange, ulysses)
    for index, levers in enumerate(DISTRIBUTED):
        passes = passes_of(SimpleNamespace(model=section(**levers)), sizes)
        counts = {
            "forwards": passes.attention, "backwards": passes.layers, "swaps": passes.swaps
        }  # fmt: skip
        matrix = layer_bytes(plan, row_traffic(plan), sizes, 4, **counts).sum(axis=1)
        for rank, results in enumerate(ranks):
            found, sent = results[index]
            assert sent == plan.bytes_sent(rank, **shape, **counts) == matrix[rank] > 0
            for name, theirs in results[0][0].items():
                assert torch.equal(found[name], theirs), (levers, name)
