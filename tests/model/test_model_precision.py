"""Where attention rounds, against a LLaMA written out with the dtypes of every part."""

from __future__ import annotations

from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import torch

from anchorcontext import Window, enable, make_plan, shard
from anchorcontext.config.sections import ModelSection, PrecisionSection
from anchorcontext.errors import UserError
from anchorcontext.model import TrainModel, attention, verify_rope
from anchorcontext.model.memory import save_memory
from anchorcontext.model.precision import set_precision
from anchorcontext.model.rope import rotary_modules
from anchorcontext.model.rotation_check import check_rotation
from anchorcontext.testing.models import tiny_model
from anchorcontext.testing.oracle import dense_mask

BF16, FP32 = torch.bfloat16, torch.float32
# Keys of attention.precision -> dtypes of tables, of the rotation, of queries and keys.
SETTINGS = {
    "stock": ({}, (BF16, BF16, BF16)),
    "rotation": ({"rotation": "fp32"}, (BF16, FP32, BF16)),
    "rope": ({"rotation": "fp32", "rope_tables": "fp32"}, (FP32, FP32, BF16)),
    "qk": ({"qk": "fp32"}, (BF16, BF16, FP32)),
    "rounded tables": ({"rotation": "fp32", "qk": "fp32"}, (BF16, FP32, FP32)),
    "all": ({"rotation": "fp32", "rope_tables": "fp32", "qk": "fp32"}, (FP32, FP32, FP32)),
}


def make_window():
    """Documents behind an anchor, at positions whose rounded tables are far off."""
    from anchorcontext.modes import with_controls

    rng = np.random.default_rng(0)
    documents = [rng.integers(3, 128, size=n) for n in (9, 20, 3)]
    return Window.from_documents(documents, 1, with_controls("anchor", offset=3000))


def make_model(settings, model_type="llama", dtype=BF16):
    """Weights large enough for the softmax to be far from uniform."""
    model = tiny_model(model_type, dtype=dtype)
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.weight.data *= 12
    if settings is not None:
        set_precision(enable(model), PrecisionSection(**settings))
    return model


def loss_and_gradients(model, window, engine="reference"):
    plan = make_plan(window, engine=engine)
    local = shard(window, plan)
    loss, _ = TrainModel(model)(local.input_ids, local.position_ids, local.labels, plan)
    loss.backward()
    return loss.detach(), {name: p.grad.double() for name, p in model.named_parameters()}


def inv_freq(model):
    return next(iter(rotary_modules(model).values())).inv_freq


def rotated(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def written_out(model, window, tables, rotation, heads):
    """Loss and gradients of the same weights; projections, norms and MLPs are the model's own."""
    ids, positions = (torch.tensor(x) for x in (window.input_ids, window.position_ids))
    seen = dense_mask(window.doc_ids.tolist(), "anchor")
    angles = positions.float()[:, None] * 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    cos, sin = (f(angles).repeat(1, 2).to(tables).to(rotation) for f in (torch.cos, torch.sin))
    x = model.model.embed_tokens(ids)
    for layer in model.model.layers:
        own = layer.self_attn
        h = layer.input_layernorm(x)
        q, k, v = (
            part(h).unflatten(-1, (-1, 16)).transpose(0, 1)
            for part in (own.q_proj, own.k_proj, own.v_proj)
        )
        q, k = (rotated(part.to(rotation), cos, sin).to(heads).float() for part in (q, k))
        k, v = (part.float().repeat_interleave(2, 0) for part in (k, v))
        scores = (q @ k.transpose(1, 2) / 4).masked_fill(~seen, -torch.inf)
        out = (scores.softmax(-1) @ v).to(x.dtype)
        x = x + own.o_proj(out.transpose(0, 1).flatten(1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    logits = model.model.norm(x).float() @ model.lm_head.weight.float().T
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(window.labels), reduction="sum")
    loss.backward()
    return loss.detach(), {name: p.grad.double() for name, p in model.named_parameters()}


def difference(found, expected):
    """Norm of the difference of all gradients, relative."""
    off = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    return (off / sum(float(g.square().sum()) for g in expected.values())) ** 0.5


@pytest.fixture(scope="module")
def expected():
    """Every setting written out, and an fp32 model of the same weights."""
    window = make_window()
    runs = {
        name: written_out(make_model(None), window, *dtypes)
        for name, (_, dtypes) in SETTINGS.items()
    }
    exact = make_model(None).float()
    return runs | {"exact": written_out(exact, window, FP32, FP32, FP32)}


@pytest.mark.parametrize("name", SETTINGS)
def test_loss_and_gradients_are_those_of_the_model_written_out(expected, name):
    """Nearer to its own than to any other: bf16 roundings that flip leave 3e-3 to 8e-3."""
    settings, dtypes = SETTINGS[name]
    loss, gradients = loss_and_gradients(make_model(settings), make_window())
    assert abs(loss - expected[name][0]) < 1e-5 * loss
    ours = difference(gradients, expected[name][1])
    assert ours < 1e-2
    for other, (_, theirs) in expected.items():
        # The reference engine takes bf16 queries and keys to fp32 itself.
        same = other in SETTINGS and SETTINGS[other][1][:2] == dtypes[:2] == (BF16, BF16)
        if other != name and not same:
            assert ours < 0.6 * difference(gradients, theirs), other


def handed_over(model, window):
    """Queries, keys and values of every layer as attention gets them."""
    seen, real = [], attention.distributed_attention

    def record(q, k, v, *more):
        seen.append((q.detach(), k.detach(), v.detach()))
        return real(q, k, v, *more)

    plan = make_plan(window)
    local = shard(window, plan)
    with mock.patch.object(attention, "distributed_attention", record), torch.no_grad():
        hidden = model(local.input_ids, position_ids=local.position_ids, plan=plan).logits
    assert hidden.dtype == model.dtype
    return seen


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("name", SETTINGS)
def test_queries_and_keys_are_rounded_where_the_setting_says(name, model_type):
    settings, (tables, rotation, heads) = SETTINGS[name]
    window, model = make_window(), make_model(settings, model_type)
    seen = handed_over(model, window)
    assert {x.dtype for layer in seen for x in layer} == {heads}
    own, norm = model.model.layers[0].self_attn, model.model.layers[0].input_layernorm
    with torch.no_grad():
        x = norm(model.model.embed_tokens(torch.tensor(window.input_ids)))
        query = own.q_proj(x).unflatten(-1, (-1, 16))
        query = own.q_norm(query) if model_type == "qwen3" else query
        positions = torch.tensor(window.position_ids)[:, None]
        angles = positions.float() * inv_freq(model)
        cos, sin = (f(angles).repeat(1, 2).to(tables).to(rotation) for f in (torch.cos, torch.sin))
        wanted = rotated(query.transpose(0, 1).to(rotation), cos, sin).to(heads)
    assert torch.equal(seen[0][0][0], wanted)


def test_recomputed_and_kept_layers_give_the_same_bits():
    window, found = make_window(), []
    for levers in ({"gradient_checkpointing": False}, {}, {"keep_attention": True}):
        model = make_model(SETTINGS["all"][0])
        save_memory(model, ModelSection(path="none", **levers))
        found.append(loss_and_gradients(model, window, "auto"))
    for (loss, gradients), (other, others) in pairwise(found):
        assert torch.equal(loss, other)
        assert all(torch.equal(gradients[name], others[name]) for name in gradients)


def test_tables_stay_those_of_the_config_and_parameters_keep_their_names():
    plain, model = tiny_model(dtype=BF16), make_model(SETTINGS["all"][0])
    assert model.state_dict().keys() == plain.state_dict().keys()
    verify_rope(model)
    trained = TrainModel(model).to(torch.bfloat16)
    verify_rope(trained.causal_lm)


def test_a_model_without_settings_is_left_alone():
    model = make_model({})
    assert repr(model) == repr(enable(tiny_model(dtype=BF16)))
    assert all(x.dtype == BF16 for layer in handed_over(model, make_window()) for x in layer)


BY_ENGINE = {"rope_tables": "fp32", "rotation": "engine"}


@pytest.mark.parametrize(
    ("by_engine", "by_layers"),
    [
        (BY_ENGINE, SETTINGS["all"][0]),
        ({"rotation": "engine"}, SETTINGS["rounded tables"][0]),
    ],
    ids=["fp32 tables", "rounded tables"],
)
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_an_engine_rotates_as_layers_in_fp32_do(by_engine, by_layers, model_type):
    """Forward to the bit; backward but for its output and key gradients, which are kept in bf16."""
    window = make_window()
    loss, gradients = loss_and_gradients(make_model(by_engine, model_type), window)
    expected_loss, expected = loss_and_gradients(make_model(by_layers, model_type), window)
    assert torch.equal(loss, expected_loss)
    other_loss, other = loss_and_gradients(make_model({}, model_type), window)
    assert not torch.equal(loss, other_loss)
    assert difference(gradients, expected) < 0.6 * difference(gradients, other)


def test_queries_and_keys_reach_attention_unrotated_in_the_models_dtype():
    window, model = make_window(), make_model(BY_ENGINE)
    query, key, value = handed_over(model, window)[0]
    assert {x.dtype for x in (query, key, value)} == {BF16}
    own, norm = model.model.layers[0].self_attn, model.model.layers[0].input_layernorm
    with torch.no_grad():
        x = norm(model.model.embed_tokens(torch.tensor(window.input_ids)))
        wanted = own.q_proj(x).unflatten(-1, (-1, 16)).transpose(0, 1)
    assert torch.equal(query[0], wanted)


def test_kept_and_recomputed_layers_rotate_in_the_engine_alike():
    window, found = make_window(), []
    for levers in ({"gradient_checkpointing": False}, {}, {"keep_attention": True}):
        model = make_model(BY_ENGINE)
        save_memory(model, ModelSection(path="none", **levers))
        found.append(loss_and_gradients(model, window, "auto"))
    for (loss, gradients), (other, others) in pairwise(found):
        assert torch.equal(loss, other)
        assert all(torch.equal(gradients[name], others[name]) for name in gradients)


def test_positions_of_other_windows_are_refused_where_the_engine_rotates():
    window, model = make_window(), make_model(BY_ENGINE)
    plan = make_plan(window)
    local = shard(window, plan)
    with pytest.raises(UserError, match="not those of the plan's windows"):
        model(local.input_ids, position_ids=local.position_ids + 1, plan=plan)
    with pytest.raises(UserError, match=r"without position_ids=.*shard\(windows, plan\)"):
        model(local.input_ids, plan=plan)


def test_layers_that_rotate_otherwise_are_refused_by_name():
    model = make_model(BY_ENGINE)
    check_rotation(model)
    layer = model.model.layers[1].self_attn
    real = type(layer).forward

    def without(self, hidden_states, position_embeddings, *args, **kwargs):
        """As the layers of SmolLM3 and Llama 4 that have no RoPE."""
        cos, sin = position_embeddings
        still = torch.ones_like(cos), torch.zeros_like(sin)
        return real(self, hidden_states, still, *args, **kwargs)

    layer.forward = without.__get__(layer)
    with pytest.raises(UserError, match=r"layers.1.self_attn .* does not rotate as an engine does"):
        check_rotation(model)
    del layer.forward
    check_rotation(model)


def test_a_model_that_rotates_parts_of_heads_is_refused():
    model = make_model({})
    rotary = model.model.rotary_emb
    rotary.register_buffer("inv_freq", rotary.inv_freq[:4], persistent=False)
    with pytest.raises(UserError, match=r"rotates 8 of 16 columns of a head.*set it to fp32"):
        set_precision(model, PrecisionSection(**BY_ENGINE))
