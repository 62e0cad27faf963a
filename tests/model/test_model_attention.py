"""Models under our attention: logits and gradients of stock transformers with an explicit mask."""

import pytest
import torch

from anchorcontext import UserError, Window, enable, make_plan, shard, unshard
from anchorcontext.model import TrainModel, linear_cross_entropy, probe_model
from anchorcontext.model.memory import checkpoint_layers
from anchorcontext.testing.models import stock_logits, stock_loss, tiny_llama, tiny_model

MODES = ("full", "intra_doc", "intra_doc_reset", "anchor")
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


def window_of(mode, lengths=(5, 3, 4), seed=0, boundary="mask"):
    generator = torch.Generator().manual_seed(seed)
    documents = [torch.randint(3, 128, (n,), generator=generator).tolist() for n in lengths]
    return Window.from_documents(documents, anchor_id=1, mode=mode, boundary=boundary)


def planned_logits(model, windows, **arguments):
    plan = make_plan(windows)
    local = shard(windows, plan)
    output = model(local.input_ids, position_ids=local.position_ids, plan=plan, **arguments)
    return unshard(output.logits, plan)


def checkpointed(model):
    checkpoint_layers(model)
    return model


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_every_gradient_equal_stock(family, mode):
    window = window_of(mode)
    stock, ours = tiny_model(family), checkpointed(enable(tiny_model(family)))
    expected = stock_logits(stock, window)
    assert (planned_logits(ours, window) - expected).abs().max() <= 1e-5

    (stock_loss(stock, window) / window.num_targets).backward()
    plan = make_plan(window)
    local = shard(window, plan)
    loss, targets = TrainModel(ours, 4)(local.input_ids, local.position_ids, local.labels, plan)
    assert int(targets) == window.num_targets == 9
    (loss / targets).backward()
    expected_loss = stock_loss(stock, window).item()
    assert abs(loss.item() - expected_loss) <= 1e-5 * expected_loss
    for (name, theirs), mine in zip(stock.named_parameters(), ours.parameters(), strict=True):
        error = (mine.grad - theirs.grad).abs()
        assert (error <= 1e-6 + 1e-4 * theirs.grad.abs()).all(), name


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (9, 3)])
def test_grouped_query_attention_equals_stock(heads):
    query, key = heads
    shape = {
        "num_attention_heads": query,
        "num_key_value_heads": key,
        "hidden_size": 16 * query,
        "head_dim": 16,
    }
    window = window_of("anchor")
    expected = stock_logits(tiny_llama(**shape), window)
    logits = planned_logits(enable(tiny_llama(**shape)), window)
    assert (logits - expected).abs().max() <= 1e-5


def test_a_micro_batch_of_windows_equals_each_window_alone():
    windows = [window_of("anchor", (5, 3, 4)), window_of("anchor", (2, 9), seed=1)]
    model = enable(tiny_llama())
    together = planned_logits(model, windows)
    for row, window in enumerate(windows):
        alone = planned_logits(model, window)[0]
        assert (together[row, : len(alone)] - alone).abs().max() <= 1e-6


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_hazard_9_documents_do_not_notice_each_other(mode, training, checkpointing):
    """Bitwise, in train and eval mode, with the cache at its default (on)."""
    model = enable(tiny_llama()).train(training)
    assert model.config.use_cache
    if checkpointing:
        checkpointed(model)
    window = window_of(mode)
    ids = window.input_ids.copy()
    ids[1:6] = (ids[1:6] + 7) % 128
    changed = Window(ids, window.cu_seqlens, mode)
    before, after = planned_logits(model, window), planned_logits(model, changed)
    same = [torch.equal(before[:, a:b], after[:, a:b]) for a, b in ((6, 9), (9, 13))]
    assert same == [mode != "full"] * 2
    assert not torch.equal(before[:, 1:6], after[:, 1:6])


def test_hazard_16_the_anchor_moves_every_document():
    model = enable(tiny_llama())
    window = window_of("anchor", (7, 8, 5, 11))
    ids = window.input_ids.copy()
    ids[0] = 99
    before = planned_logits(model, window)
    after = planned_logits(model, Window(ids, window.cu_seqlens, "anchor"))
    moved = (before != after).any(dim=-1)[0]
    assert moved.all()


def test_masks_caches_and_missing_plans_are_refused():
    model = enable(tiny_llama())
    window = window_of("anchor")
    plan = make_plan(window)
    local = shard(window, plan)
    ids, length = local.input_ids, window.num_tokens
    with pytest.raises(UserError, match="plan="):
        model(ids)
    for mask in (torch.ones(1, length), torch.zeros(1, 1, length, length)):
        with pytest.raises(UserError, match="attention_mask"):
            model(ids, attention_mask=mask, plan=plan)
    with pytest.raises(UserError, match="tokens a rank"):
        model(ids[:, :-1], plan=plan)
    with pytest.raises(UserError, match="output_attentions"):
        model(ids, plan=plan, output_attentions=True)
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    for name in ("cache", "past_key_values"):
        with pytest.raises(UserError, match="no cache"):
            model.get_decoder()(ids, plan=plan, **{name: cache})


def test_enable_twice_is_once_and_stock_attention_can_come_back():
    model = enable(enable(tiny_llama()))
    assert len(model.get_decoder()._forward_pre_hooks) == 1
    assert model.config._attn_implementation == "anchorcontext"
    window = window_of("anchor")
    expected = planned_logits(model, window)
    again = stock_logits(model, window)
    assert (again - expected).abs().max() <= 1e-5
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 128)


def test_low_precision_models_give_low_precision_logits():
    model = enable(tiny_llama(dtype=torch.bfloat16))
    logits = planned_logits(model, window_of("anchor"))
    assert logits.dtype == torch.bfloat16
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_probe_accepts_the_supported_families(family):
    model = enable(tiny_model(family))
    probe_model(model)
    assert model.training


def test_the_probe_sees_a_layer_that_leaves_the_attention_interface():
    model = enable(tiny_llama())

    def leak(module, args, output):
        return output + output.mean(dim=1, keepdim=True)

    model.model.layers[0].mlp.register_forward_hook(leak)
    with pytest.raises(UserError, match="attention interface"):
        probe_model(model)


def test_the_probe_sees_a_head_that_is_more_than_a_product():
    model = enable(tiny_llama())

    def cap(module, args, output):
        output.logits = 3 * torch.tanh(output.logits / 3)
        return output

    model.register_forward_hook(cap)
    with pytest.raises(UserError, match="lm_head"):
        probe_model(model)


def test_logits_come_in_chunks_that_never_hold_them_all():
    model = enable(tiny_llama())
    train_model = TrainModel(model, 5)
    window = window_of("anchor")
    plan = make_plan(window)
    local = shard(window, plan)
    hidden = train_model.hidden_states(local.input_ids, local.position_ids, plan)
    chunks = list(train_model.logits_chunks(hidden))
    assert [logits.shape[1] for _, logits in chunks] == [5, 5, 3]
    whole = torch.cat([logits for _, logits in chunks], dim=1)
    assert torch.allclose(whole, planned_logits(model, window).float(), atol=1e-6)


def test_hazard_2_labels_are_not_shifted_again():
    window = window_of("anchor")
    plan = make_plan(window)
    local = shard(window, plan)
    model = enable(tiny_llama())
    loss, _ = TrainModel(model)(local.input_ids, local.position_ids, local.labels, plan)
    logits = planned_logits(model, window)[0]
    by_hand = sum(
        -logits[i].log_softmax(-1)[window.input_ids[i + 1]].item()
        for i in range(window.num_tokens - 1)
        if window.doc_ids[i] == window.doc_ids[i + 1]
    )
    assert abs(loss.item() - by_hand) <= 1e-4


def test_hazard_3_no_target_gives_zero_and_finite_zero_gradients():
    window = window_of("anchor", (1, 1, 1))
    assert window.num_targets == 0
    plan = make_plan(window)
    local = shard(window, plan)
    model = enable(tiny_llama())
    loss, targets = TrainModel(model)(local.input_ids, local.position_ids, local.labels, plan)
    loss.backward()
    assert loss.item() == 0.0 and int(targets) == 0
    assert all(bool((p.grad == 0).all()) for p in model.parameters())


def test_the_loss_function_is_the_one_the_model_is_trained_with():
    model = enable(tiny_llama())
    window = window_of("anchor")
    plan = make_plan(window)
    local = shard(window, plan)
    train_model = TrainModel(model, 3)
    loss, _ = train_model(local.input_ids, local.position_ids, local.labels, plan)
    hidden = train_model.hidden_states(local.input_ids, local.position_ids, plan)
    again = linear_cross_entropy(hidden, model.lm_head.weight, local.labels, 100)
    assert torch.allclose(loss, again, rtol=1e-6)
