"""Equations 4 and 5, streamed: against hand-made matrices and against dense attention."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from anchorcontext.precision import (
    DeviationSum,
    ExactRotary,
    LayerAttention,
    Variant,
    Workers,
    attention_differences,
    attention_rows,
    column_bins,
    difference,
    exact_norms,
    walk,
)
from anchorcontext.precision.measures import Deviation
from anchorcontext.testing.models import tiny_llama


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers(2) as pool:
        yield pool


def from_scores(scores: torch.Tensor) -> LayerAttention:
    """Attention whose scores are just these, (heads, T, T)."""
    eye = torch.eye(scores.shape[1], dtype=scores.dtype)
    return LayerAttention(scores, eye[None], eye[None], 1.0)


def random_attention(
    seed: int, tokens: int = 70, dtype: torch.dtype = torch.float64
) -> LayerAttention:
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(n, tokens, 8, generator=g, dtype=torch.float64) for n in (4, 2))
    return LayerAttention(q.to(dtype), k.to(dtype), k.to(dtype), 0.3)


def dense(attention: LayerAttention) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores, 0 above the diagonal, and probabilities, (heads, T, T) in fp64, in plain torch."""
    q, k = attention.query.double(), attention.key.double().repeat_interleave(2, dim=0)
    scores = attention.scaling * q @ k.transpose(1, 2)
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, 0), scores.masked_fill(later, -torch.inf).softmax(-1)


def deviation(
    reference: LayerAttention, other: LayerAttention, workers: Workers, scores: str = "fp32"
) -> Deviation:
    total = DeviationSum(reference.num_tokens)
    found = attention_differences(reference, [other], workers=workers, scores=scores)
    total.add(found, 0, 0)
    return total.result()


def test_equation_4_on_matrices_made_by_hand(workers: Workers) -> None:
    # Row i of P is softmax of its scores: logs of wanted probabilities give just these.
    first = torch.tensor([[1.0, 9, 9], [0.5, 0.5, 9], [0.2, 0.3, 0.5]], dtype=torch.float64)
    second = torch.tensor([[1.0, 9, 9], [0.75, 0.25, 9], [0.1, 0.3, 0.6]], dtype=torch.float64)
    found = deviation(from_scores(first.log()[None]), from_scores(second.log()[None]), workers)
    # Column sums of the difference: 0.25 - 0.1, -0.25 + 0, 0.1; of |entries|: 0.35, 0.25, 0.1.
    wanted = {
        ("signed", "unweighted"): 0.0,
        ("column", "unweighted"): 0.15 + 0.25 + 0.1,
        ("entry", "unweighted"): 0.35 + 0.25 + 0.1,
        ("signed", "weighted"): 0.15 / 3 - 0.25 / 2 + 0.1 / 1,
        ("column", "weighted"): 0.15 / 3 + 0.25 / 2 + 0.1 / 1,
        ("entry", "weighted"): 0.35 / 3 + 0.25 / 2 + 0.1 / 1,
    }
    for (form, weights), value in wanted.items():
        assert found.total(form, weights) == pytest.approx(value, abs=1e-14), (form, weights)
    assert found.first_share("entry", "unweighted") == pytest.approx(0.35 / 0.7)
    # The first row moves nothing, the second 0.25, the third 0.1.
    assert found.moved() == pytest.approx(0.35 / 3)
    np.testing.assert_allclose(found.columns[2], [0.35 / 3, 0.25 / 2, 0.1])
    np.testing.assert_allclose(found.mass, [1.7 / 3, 0.8 / 2, 0.5])


def test_equation_5_is_the_mean_over_the_rows_that_see_a_column(workers: Workers) -> None:
    first = torch.zeros(1, 3, 3, dtype=torch.float64)
    second = torch.tensor([[[1.0, 7, 7], [2, -4, 7], [-6, 1, 5]]], dtype=torch.float64)
    found = deviation(from_scores(first), from_scores(second), workers)
    np.testing.assert_allclose(found.logits[0], [-3 / 3, -3 / 2, 5])
    np.testing.assert_allclose(found.logits[1], [3 / 3, 3 / 2, 5])
    np.testing.assert_allclose(found.logits[2], [9 / 3, 5 / 2, 5])


@pytest.mark.parametrize("block", [1, 1 << 18])
@pytest.mark.parametrize("tokens", [2, 70])
def test_streamed_equals_dense(
    tokens: int, block: int, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(difference.BLOCK_ELEMENTS, "cpu", block)
    monkeypatch.setattr(difference, "TASK_ROWS", 33)
    a, b, c = (random_attention(seed, tokens) for seed in range(3))
    found = attention_differences(a, [b, c], workers=workers)
    for number, other in enumerate((b, c)):
        (s0, p0), (s, p) = dense(a), dense(other)
        wanted = [(p - p0).sum(1), (p - p0).abs().sum(1), (s - s0).sum(1), (s - s0).abs().sum(1)]
        for got, want in zip(found.sums[0, number], wanted, strict=True):
            torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(found.mass[0], p0.sum(1), atol=1e-12, rtol=1e-12)


def test_a_prefix_is_the_same_as_its_own_run(workers: Workers) -> None:
    a, b = random_attention(0), random_attention(1)
    found = attention_differences(a, [b], workers=workers, lengths=(9, 40, 70))
    for n, length in enumerate((9, 40)):
        cut_a, cut_b = (
            LayerAttention(x.query[:, :length], x.key[:, :length], x.value[:, :length], x.scaling)
            for x in (a, b)
        )
        alone = attention_differences(cut_a, [cut_b], workers=workers)
        torch.testing.assert_close(found.sums[n, ..., :length], alone.sums[0], atol=1e-13, rtol=0)
        torch.testing.assert_close(found.mass[n, ..., :length], alone.mass[0], atol=1e-13, rtol=0)
        assert not found.sums[n, ..., length:].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scores", ["fp32", "model"])
def test_equal_forwards_differ_by_exactly_nothing(
    dtype: torch.dtype, scores: difference.Scores, workers: Workers
) -> None:
    a = random_attention(0, dtype=dtype)
    found = attention_differences(a, [a], workers=workers, scores=scores)
    assert not found.sums.any()


def test_signed_sum_without_weights_is_zero_in_fp64(workers: Workers) -> None:
    found = deviation(random_attention(0), random_attention(1), workers)
    assert abs(found.total("signed", "unweighted")) < 1e-12
    assert abs(found.total("signed", "weighted")) > 1e-3
    assert found.total("column") > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_model_scores_are_those_of_transformers_eager_attention(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import eager_attention_forward

    a = random_attention(0, dtype=dtype)
    mask = torch.full((70, 70), torch.finfo(dtype).min, dtype=dtype).triu(1)
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    _, eager = eager_attention_forward(
        module.eval(), a.query[None], a.key[None], a.value[None], mask, a.scaling
    )
    _, mine = attention_rows(a, 3, 0, 70, scores="model")
    assert torch.equal(mine, eager[0, 3].float())
    _, fp32 = attention_rows(a, 3, 0, 70)
    assert not torch.equal(fp32, mine)


def test_forwards_in_two_dtypes_are_compared_in_the_wider_one(workers: Workers) -> None:
    exact, rough = random_attention(0), random_attention(0, dtype=torch.bfloat16)
    found = attention_differences(rough, [exact], workers=workers).sums[0, 0]
    swapped = attention_differences(exact, [rough], workers=workers).sums[0, 0]
    (s0, p0), (s, p) = dense(rough), dense(exact)
    wanted = [(p - p0).sum(1), (p - p0).abs().sum(1), (s - s0).sum(1), (s - s0).abs().sum(1)]
    for one, other, want, sign in zip(found, swapped, wanted, (-1, 1, -1, 1), strict=True):
        torch.testing.assert_close(one, want, atol=1e-4, rtol=0)  # bf16 scores are fp32 sums
        torch.testing.assert_close(sign * other, one, atol=1e-12, rtol=0)


def test_the_number_of_workers_changes_no_bit() -> None:
    a, b = (random_attention(seed, 600, torch.float32) for seed in (0, 1))
    found = []
    for count in (1, 3):
        with Workers(count) as pool:
            found.append(attention_differences(a, [b], workers=pool).sums)
    assert torch.equal(*found)


def test_shifts_change_nothing_in_fp64(workers: Workers) -> None:
    """RoPE's invariance holds to 1e-12 where tables and norms are fp64 as well."""
    model = tiny_llama(dtype=torch.float64).eval()
    ids, positions = torch.arange(64) * 37 % 128, torch.arange(64)
    rotary = ExactRotary(model.config)
    variants = [Variant(positions + shift, rotary=rotary) for shift in (16, 0, 2000)]
    for scale in (1.0, 8.0):  # larger weights: peaked attention
        for layer in model.get_decoder().layers:
            layer.self_attn.q_proj.weight.data.mul_(scale)
        with exact_norms(model):
            for states in walk(model, ids, variants, workers=workers):
                found = attention_differences(
                    states.attention[0], states.attention[1:], workers=workers
                )
                assert found.sums.abs().max() / found.mass.sum() < 1e-12
                assert found.sums.any()


def test_bins_are_single_columns_first_and_cover_all() -> None:
    edges = column_bins(4096)
    assert list(edges[:33]) == list(range(33)) and edges[-1] == 4096
    assert (np.diff(edges) > 0).all() and len(edges) < 100
    assert list(column_bins(3)) == [0, 1, 2, 3]
