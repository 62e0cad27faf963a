"""The walk: every variant is the stock forward of its own positions, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from anchorcontext.errors import UserError
from anchorcontext.precision import (
    ExactRotary,
    LayerStates,
    Variant,
    Workers,
    check_walkable,
    exact_norms,
    walk,
)
from anchorcontext.testing.models import OF_TYPE, tiny_llama, tiny_model

TOKENS = 40
IDS = torch.arange(TOKENS) * 37 % 128
POSITIONS = torch.arange(TOKENS)


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers(2) as pool:
        yield pool


def walked(
    model: PreTrainedModel, variants: list[Variant], workers: Workers, same_input: bool = False
) -> list[LayerStates]:
    return list(walk(model.eval(), IDS, variants, workers=workers, same_input=same_input))


def stock_hidden(model: PreTrainedModel, positions: torch.Tensor) -> torch.Tensor:
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        return (
            model.get_decoder()(
                input_ids=IDS[None], position_ids=positions[None], use_cache=False
            ).last_hidden_state
        )[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("model_type", OF_TYPE)
def test_each_variant_is_the_stock_forward_of_its_positions(
    model_type: str, dtype: torch.dtype, workers: Workers
) -> None:
    model = tiny_model(model_type, dtype=dtype)
    shifted = POSITIONS + 300
    states = walked(model, [Variant(POSITIONS), Variant(shifted)], workers)
    assert [s.layer for s in states] == [0, 1]
    for hidden, positions in zip(states[-1].hidden, (POSITIONS, shifted), strict=True):
        with torch.no_grad():
            normed = model.get_decoder().norm(hidden)
        assert torch.equal(normed, stock_hidden(model, positions))


def test_captured_queries_and_keys_give_the_models_own_attention(workers: Workers) -> None:
    model = tiny_model("qwen3")
    states = walked(model, [Variant(POSITIONS + 5)], workers)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(
            input_ids=IDS[None],
            position_ids=POSITIONS[None] + 5,
            use_cache=False,
            output_attentions=True,
        ).attentions
    for state, dense in zip(states, weights, strict=True):
        seen = state.attention[0]
        keys = seen.key.repeat_interleave(2, dim=0)
        scores = seen.scaling * seen.query @ keys.transpose(1, 2)
        later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
        probabilities = scores.masked_fill(later, -torch.inf).softmax(-1)
        torch.testing.assert_close(probabilities, dense[0], atol=1e-6, rtol=1e-5)


def test_the_same_input_shows_a_layers_own_deviation(workers: Workers) -> None:
    model = tiny_llama()
    variants = [Variant(POSITIONS), Variant(POSITIONS + 1000)]
    own, inherited = (walked(model, variants, workers, same) for same in (True, False))
    # v does not depend on positions: with equal input it is equal, else it has drifted.
    assert torch.equal(own[1].attention[0].value, own[1].attention[1].value)
    assert not torch.equal(inherited[1].attention[0].value, inherited[1].attention[1].value)
    assert torch.equal(own[0].attention[1].query, inherited[0].attention[1].query)
    assert torch.equal(own[1].hidden[0], inherited[1].hidden[0])


def test_a_variant_can_have_its_own_tokens(workers: Workers) -> None:
    other = IDS.clone()
    other[0] = 5
    model = tiny_llama()
    states = walked(model, [Variant(POSITIONS), Variant(POSITIONS, input_ids=other)], workers)
    first, second = (a.value for a in states[0].attention)
    assert not torch.equal(first[:, 0], second[:, 0])
    assert torch.equal(first[:, 1:], second[:, 1:])


def test_wider_tables_leave_wider_queries(workers: Workers) -> None:
    model = tiny_llama(dtype=torch.bfloat16)
    rotary = ExactRotary(model.config, torch.float32)
    states = walked(model, [Variant(POSITIONS), Variant(POSITIONS, rotary=rotary)], workers)
    assert [a.query.dtype for a in states[0].attention] == [torch.bfloat16, torch.float32]
    assert states[-1].hidden[1].dtype == torch.bfloat16


def test_without_first_is_attention_that_never_saw_it(workers: Workers) -> None:
    attention = walked(tiny_llama(), [Variant(POSITIONS)], workers)[0].attention[0]
    rest = attention.without_first(3)
    assert rest.num_tokens == TOKENS - 3
    assert torch.equal(rest.key, attention.key[:, 3:])


def test_a_model_that_is_more_than_its_layers_is_refused(workers: Workers) -> None:
    model = tiny_llama().eval()
    check_walkable(model, workers)

    class Doubled(nn.Embedding):
        pass

    decoder = model.get_decoder()
    decoder.register_forward_hook(
        lambda module, inputs, output: setattr(
            output, "last_hidden_state", output.last_hidden_state * 2
        )
    )
    with pytest.raises(UserError, match="walked layer by layer"):
        check_walkable(model, workers)


def test_a_sliding_window_is_refused(workers: Workers) -> None:
    model = tiny_model("mistral", sliding_window=8)
    with pytest.raises(UserError, match="sliding_window"):
        walked(model, [Variant(POSITIONS)], workers)


def test_exact_norms_compute_in_fp64_and_go_away_again() -> None:
    model = tiny_llama(dtype=torch.float64)
    norm = model.get_decoder().norm
    x = torch.randn(7, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = norm.weight * x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
    with torch.no_grad(), exact_norms(model) as count:
        exact = norm(x)
    assert count == 5
    assert (exact - wanted).abs().max() < 1e-14
    assert (norm(x) - wanted).abs().max() > 1e-9


def test_exact_tables_are_the_stock_ones_before_rounding() -> None:
    model = tiny_llama(dtype=torch.bfloat16)
    x = torch.zeros(1, TOKENS, 64, dtype=torch.bfloat16)
    positions = POSITIONS[None] + 100_000
    for exact, stock in zip(
        ExactRotary(model.config)(x, positions),
        model.get_decoder().rotary_emb(x, positions),
        strict=True,
    ):
        assert exact.dtype == stock.dtype == torch.bfloat16
        # fp32 angles of 100,000 are off by up to 4e-3.
        torch.testing.assert_close(exact, stock, atol=2e-2, rtol=0)
