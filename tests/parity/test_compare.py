"""The comparison core: statistics of two runs, and the verdict on them."""

from __future__ import annotations

import json
import math

import pytest
import torch

from anchorcontext.cli.common import to_jsonable
from anchorcontext.parity.compare import LogitsDifference, Place, compare_tensors
from anchorcontext.parity.report import (
    Check,
    Comparison,
    ParityError,
    ParityReport,
    judge_gradients,
    judge_logits,
    judge_loss,
)
from anchorcontext.parity.tolerances import TOLERANCES, tolerances_for

FP32 = TOLERANCES[torch.float32]
BF16 = TOLERANCES[torch.bfloat16]


def logits_pair(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    reference = torch.randn(24, 50, generator=generator)
    return reference + 1e-4 * torch.randn(24, 50, generator=generator), reference


def gradient(name: str, value: torch.Tensor | None, reference: torch.Tensor | None):
    return compare_tensors(name, value, reference, relative=1e-4, absolute=1e-6)


@pytest.mark.parametrize(("chunk", "block"), [(1, 1000), (5, 130), (24, 1), (24, 10000)])
def test_logits_statistics_do_not_depend_on_the_chunks(chunk, block, monkeypatch):
    monkeypatch.setattr("anchorcontext.parity.compare.BLOCK_ELEMENTS", block)
    logits, reference = logits_pair()
    difference = LogitsDifference()
    for start in range(0, 24, chunk):
        tokens = torch.arange(24)[start : start + chunk]
        difference.add(3, tokens, logits[tokens], reference[tokens])
    error = (logits - reference).abs()
    token, vocab = divmod(int(error.argmax()), 50)
    assert difference.max_abs == pytest.approx(float(error.max()))
    assert difference.where == Place(window=3, token=token, vocab=vocab)
    assert difference.mean_abs == pytest.approx(float(error.mean()), rel=1e-5)
    assert difference.relative == pytest.approx(float(error.norm() / reference.norm()), rel=1e-5)
    by_token = error.norm(dim=-1) / reference.norm(dim=-1)
    assert difference.max_token_relative == pytest.approx(float(by_token.max()), rel=1e-5)
    assert difference.where_relative.token == int(by_token.argmax())
    assert (difference.num_tokens, difference.num_values) == (24, 24 * 50)


def test_argmax_agreement_counts_tokens():
    reference = torch.eye(4)
    logits = reference.clone()
    logits[1] = torch.tensor([2.0, 0.0, 0.0, 0.0])
    difference = LogitsDifference()
    difference.add(0, torch.arange(4), logits, reference)
    assert difference.argmax_agreement == 0.75


def test_the_place_is_the_token_of_the_window_not_the_row_of_the_chunk():
    reference = torch.zeros(3, 8)
    logits = reference.clone()
    logits[2, 5] = 1.0
    difference = LogitsDifference()
    difference.add(1, torch.tensor([40, 7, 99]), logits, reference)
    assert str(difference.where) == "window 1, token 99, vocab 5"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["logits", "reference", "both"])
def test_logits_that_are_not_finite_fail_wherever_they_stand(value, side):
    logits, reference = logits_pair()
    if side != "reference":
        logits[4, 7] = value
    if side != "logits":
        reference[4, 7] = value
    difference = LogitsDifference()
    difference.add(0, torch.arange(12, 24), reference[12:], reference[12:])
    difference.add(0, torch.arange(12), logits[:12], reference[:12])
    assert difference.where == Place(0, 4, 7)
    assert difference.num_nonfinite == 1
    assert not all(check.passed for check in judge_logits(difference, FP32))
    both = judge_logits(difference, BF16, to_exact=(difference, difference))
    assert not all(check.passed for check in both)


def test_logits_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="shapes must be equal"):
        LogitsDifference().add(0, torch.arange(2), torch.zeros(2, 5), torch.zeros(2, 6))
    with pytest.raises(ValueError, match="shapes must be equal"):
        LogitsDifference().add(0, torch.arange(3), torch.zeros(2, 5), torch.zeros(2, 5))


@pytest.mark.parametrize(
    ("scale", "error", "passes"),
    [(0.5, 0.9e-5, True), (0.5, 1.2e-5, False), (20.0, 1.5e-4, True), (20.0, 2.5e-4, False)],
)
def test_the_logit_limit_grows_with_logits_above_one(scale, error, passes):
    reference = torch.full((2, 4), scale, dtype=torch.float64)
    logits = reference.clone()
    logits[1, 2] += error
    difference = LogitsDifference()
    difference.add(0, torch.arange(2), logits, reference)
    largest, _ = judge_logits(difference, FP32)
    assert largest.passed is passes


def test_tensor_statistics_across_chunks(monkeypatch):
    monkeypatch.setattr("anchorcontext.parity.compare.CHUNK_ELEMENTS", 7)
    generator = torch.Generator().manual_seed(1)
    reference = torch.randn(6, 9, generator=generator)
    value = reference + 1e-3 * torch.randn(6, 9, generator=generator)
    value[4, 2] += 0.5
    difference = gradient("w", value, reference)
    error = (value - reference).double()
    assert difference.where == (4, 2)
    assert difference.max_abs == pytest.approx(float(error.abs().max()))
    assert difference.relative_norm == pytest.approx(float(error.norm() / reference.norm()))
    expected = torch.cosine_similarity(value.flatten(), reference.flatten(), dim=0)
    assert difference.cosine == pytest.approx(float(expected), abs=1e-6)


def test_a_gradient_within_the_entry_tolerance_passes_and_a_little_more_fails():
    reference = torch.tensor([1.0, 1e-4, 0.0], dtype=torch.float64)
    within = reference + torch.tensor([0.9e-4, 0.9e-6, 0.9e-6])
    beyond = reference + torch.tensor([0.9e-4, 0.9e-6, 1.1e-6])
    assert gradient("w", within, reference).violation < 1
    assert gradient("w", beyond, reference).violation > 1
    assert gradient("w", beyond, reference).where == (2,)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("side", ["value", "reference", "both"])
def test_a_gradient_that_is_not_finite_fails(value, side):
    a, b = torch.ones(4, 3), torch.ones(4, 3)
    if side != "reference":
        a[2, 1] = value
    if side != "value":
        b[2, 1] = value
    difference = gradient("w", a, b)
    assert difference.problem == "1 of 12 entries are not finite"
    assert difference.where == (2, 1)
    check, rows = judge_gradients([difference], FP32)
    assert not rows[0].passed and not check.passed


@pytest.mark.parametrize(
    ("value", "reference", "problem"),
    [
        (None, torch.ones(2), "missing in the distributed run"),
        (torch.ones(2), None, "missing in the baseline"),
        (None, None, "missing on both sides"),
        (torch.ones(2, 3), torch.ones(3, 2), "shape (2, 3) against (3, 2)"),
        (torch.ones(6), torch.ones(2, 3), "shape (6,) against (2, 3)"),
    ],
)
def test_missing_and_misshapen_gradients_fail(value, reference, problem):
    difference = gradient("w", value, reference)
    assert difference.problem == problem
    _, rows = judge_gradients([gradient("v", torch.ones(2), torch.ones(2)), difference], FP32)
    assert [row.passed for row in rows] == [True, False]


def test_tiny_gradients_are_held_to_their_norm():
    """Entries of 1e-7 all pass 1e-6 + 1e-4 |g|; twice their norm must not."""
    generator = torch.Generator().manual_seed(2)
    small = 1e-7 * torch.randn(100, generator=generator)
    other = 1e-6 * torch.randn(100, generator=generator)
    rows = judge_gradients([gradient("a", 2 * small, small), gradient("b", other, other)], FP32)[1]
    assert gradient("a", 2 * small, small).violation < 1
    assert [row.passed for row in rows] == [False, True]


def test_a_parameter_without_gradient_may_carry_rounding_noise_only():
    zero, large = torch.zeros(10), torch.ones(100)
    for noise, passes in ((1e-7, True), (1e-4, False)):
        differences = [gradient("a", zero + noise, zero), gradient("b", large, large)]
        _, rows = judge_gradients(differences, FP32)
        assert rows[0].passed is passes


def test_bf16_is_held_to_a_multiple_of_the_single_device_error():
    exact = torch.linspace(-1, 1, 200, dtype=torch.float64)
    noise = torch.randn(200, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    single = exact + 0.02 * noise
    for factor, passes in ((-1.0, True), (2.9, True), (4.0, False)):
        ours = exact + factor * 0.02 * noise
        _, (row,) = judge_gradients(
            [gradient("w", ours, single)],
            BF16,
            to_exact=([gradient("w", ours, exact)], [gradient("w", single, exact)]),
        )
        assert row.passed is passes


def test_bf16_holds_no_parameter_to_less_than_the_typical_error():
    """A single device that happens to hit the exact value once must not be the measure."""
    exact = torch.ones(50, dtype=torch.float64)
    names, errors = ("a", "b", "lucky"), (0.02, 0.02, 1e-6)
    for ours_error, passes in ((0.03, True), (0.2, False)):
        ours = [gradient(name, exact * (1 + ours_error), exact) for name in names]
        single = [
            gradient(name, exact * (1 + error), exact)
            for name, error in zip(names, errors, strict=True)
        ]
        _, rows = judge_gradients(ours, BF16, to_exact=(ours, single))
        assert all(row.passed is passes for row in rows)


def test_logits_below_one_are_held_to_their_norm():
    generator = torch.Generator().manual_seed(4)
    reference = 1e-2 * torch.randn(24, 50, generator=generator)
    difference = LogitsDifference()
    difference.add(0, torch.arange(24), reference + 2e-6, reference)
    largest, relative = judge_logits(difference, FP32)
    assert largest.passed and not relative.passed


def test_a_limit_given_by_the_user_replaces_the_multiple():
    limits = tolerances_for(torch.bfloat16, gradient=0.01)
    assert limits.multiple_of("gradient") is None
    assert limits.multiple_of("logits") == BF16.multiple
    assert limits.gradient == 0.01
    for follower in ("gradient_absolute", "gradient_norm"):
        expected = getattr(BF16, follower) * 0.01 / BF16.gradient
        assert getattr(limits, follower) == pytest.approx(expected)
    assert tolerances_for(torch.float32) == FP32


@pytest.mark.parametrize(
    ("loss", "reference", "passes"),
    [(2.0, 2.0, True), (2.00001, 2.0, True), (2.0001, 2.0, False), (math.nan, 2.0, False)],
)
def test_loss(loss, reference, passes):
    assert judge_loss(loss, reference, FP32).passed is passes


def test_the_report_names_the_worst_and_raises():
    good = gradient("good", torch.ones(3), torch.ones(3))
    bad = gradient("layers.1.bad", 2 * torch.ones(3), torch.ones(3))
    check, rows = judge_gradients([good, bad], FP32)
    comparison = Comparison("stock transformers", 1, 3, checks=[check], gradients=rows)
    report = ParityReport("parity", [comparison])
    assert comparison.worst_gradients(1)[0].difference.name == "layers.1.bad"
    with pytest.raises(ParityError, match=r"layers\.1\.bad .* FAILED") as caught:
        report.raise_if_failed()
    assert caught.value.report is report
    assert json.loads(json.dumps(to_jsonable(report.to_dict())))["passed"] is False


def test_nothing_compared_is_not_a_pass():
    assert not ParityReport("empty", []).passed
    assert not ParityReport("empty", [Comparison("nothing", 0, 0)]).passed
    assert not Check("x", math.inf, None).passed
