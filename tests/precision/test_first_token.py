"""diagnose first-token: arms, analytic cases, and readings that follow the numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anchorcontext.errors import UserError
from anchorcontext.precision import DeviationSum, LayerAttention, Workers, attention_differences
from anchorcontext.precision.first_token.arms import Vocabulary, check_arm, make_arm
from anchorcontext.precision.first_token.measure import (
    ArmResult,
    FirstTokenSettings,
    check_first_token_settings,
    describe,
    first_token_units,
    run_first_token,
    stored_arms,
)
from anchorcontext.precision.first_token.sheet import cause, first_token_readings

VOCABULARY = Vocabulary(size=50, eos=2, special=frozenset({1, 2}))
TEXT = torch.tensor([1, 7, 9, 7, 11, 12, 7, 13])


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers(1) as pool:
        yield pool


def arm(name: str) -> Any:
    return make_arm(name, TEXT, shifts=(16, 0), vocabulary=VOCABULARY, seed=0)


def test_plain_shifts_all_positions() -> None:
    plain = arm("plain")
    assert plain.ids.tolist() == TEXT[:-1].tolist()
    assert plain.positions.tolist() == [list(range(16, 23)), list(range(7))]


def test_clamped_keeps_the_first_position() -> None:
    assert arm("clamped").positions.tolist() == [[0, 17, 18, 19, 20, 21, 22], [0, 1, 2, 3, 4, 5, 6]]


def test_a_gap_moves_all_but_the_first() -> None:
    assert arm("gap:100").positions[1].tolist() == [0, 101, 102, 103, 104, 105, 106]


def test_bos_can_stand_elsewhere() -> None:
    moved = arm("moved:3")
    assert moved.ids.tolist() == [7, 9, 7, 1, 11, 12, 7]
    assert moved.spots == {"first": 0, "bos": 3}


def test_other_first_tokens() -> None:
    assert arm("token:eos").ids.tolist() == [2, 7, 9, 7, 11, 12, 7]
    assert arm("token:frequent").ids[0] == 7
    assert arm("token:none").ids.tolist() == TEXT[1:].tolist()
    assert arm("token:33").ids[0] == 33
    drawn = int(arm("token:random").ids[0])
    assert drawn == int(arm("token:random").ids[0]) and drawn not in VOCABULARY.special


@pytest.mark.parametrize("name", ["sink", "gap:0", "gap:x", "moved:9", "token:", "token:99"])
def test_arms_that_do_not_exist_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"arm"):
        check_arm(name, 8, VOCABULARY)


def made_of(scores: torch.Tensor) -> LayerAttention:
    """One head whose scores are ``scores`` (T, T): queries are unit vectors."""
    tokens = len(scores)
    keys = scores.t().contiguous()
    return LayerAttention(
        torch.eye(tokens, dtype=torch.float64)[None], keys[None], torch.zeros(1, tokens, 1), 1.0
    )


def described(
    reference: torch.Tensor, other: torch.Tensor, workers: Workers, left_out: int = 0
) -> dict[str, Any]:
    one, two = (made_of(scores).without_first(left_out) for scores in (reference, other))
    total = DeviationSum(len(reference) - left_out)
    total.add(attention_differences(one, [two], workers=workers), 0, 0)
    return describe(total.result(), {"first": 0})


def test_a_deviation_on_the_first_column_alone_goes_away_without_it(workers: Workers) -> None:
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(12, 12, dtype=torch.float64, generator=generator)
    other = reference.clone()
    other[:, 0] += 0.5
    spot = described(reference, other, workers)["spots"]["first"]
    assert abs(spot["score"] - 0.5) < 1e-12 and spot["score_share"] > 1 - 1e-12
    # Half of what moves lands on the first column, the rest is taken from the others.
    assert abs(spot["share_unweighted"] - 0.5) < 1e-9
    assert spot["score_ratio"] == np.inf and cause(spot, 12) == "larger logit error"
    without = described(reference, other, workers, left_out=1)
    assert without["total"]["entry"]["weighted"] < 1e-12


def test_equal_logit_errors_on_a_sink_are_sink_mass(workers: Workers) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = 64
    reference = torch.zeros(tokens, tokens, dtype=torch.float64)
    reference[:, 0] = 4.0  # about half of the probability
    noise = torch.randn(tokens, tokens, dtype=torch.float64, generator=generator).sign() * 0.01
    spot = described(reference, reference + noise, workers)["spots"]["first"]
    assert spot["share"] > 0.2 and abs(spot["score_ratio"] - 1) < 1e-9
    assert cause(spot, tokens) == "sink mass"
    # The same error without the sink: nothing stands out.
    flat = described(torch.zeros_like(reference), noise, workers)["spots"]["first"]
    assert cause(flat, tokens) in ("no more than others", "sink mass") and flat["share"] < 0.1
    # A larger error on it as well: both.
    noise[:, 0] *= 3
    both = described(reference, reference + noise, workers)["spots"]["first"]
    assert cause(both, tokens) == "both"


def settings_of(model_folder: str, documents: str) -> FirstTokenSettings:
    return check_first_token_settings(
        FirstTokenSettings(
            model_folder,
            settings=("fp64", "bf16"),
            arms=("plain", "clamped", "moved:5", "token:none"),
            tokens=24,
            texts=2,
            source=documents,
        )
    )


def test_rounding_and_true_changes_are_told_apart(
    model_folder: str, documents: str, tmp_path: Path, workers: Workers
) -> None:
    settings = settings_of(model_folder, documents)
    run_first_token(settings, tmp_path, workers=workers)
    results, made = stored_arms(settings, tmp_path)
    assert len(made) == 1 and len(first_token_units(settings)) == 16
    found = {(r.setting, r.arm): r for r in results}

    def total(setting: str, name: str) -> float:
        return found[f"pretrained:{setting}", name].values["total"]["entry"]["weighted"]

    # In fp64 shifts change nothing, but a clamped first token changes its distances.
    for name in ("plain", "excluded", "moved:5", "token:none"):
        assert total("fp64", name) < 1e-9 < total("bf16", name)
    assert total("fp64", "clamped") > 1e-3
    assert all(r.texts == 2 for r in results)
    assert found["pretrained:bf16", "excluded"].values["tokens"] == 23
    (clamped,) = [r for r in first_token_readings(results) if "clamping" in r]
    assert "in fp64 as well" in clamped


def test_stored_arms_are_not_measured_again(
    model_folder: str, documents: str, tmp_path: Path, workers: Workers
) -> None:
    settings = replace(settings_of(model_folder, documents), settings=("pretrained:bf16",), texts=1)
    run_first_token(settings, tmp_path, workers=workers)
    steps: list[object] = []
    run_first_token(replace(settings, texts=2), tmp_path, workers=workers, tell=steps.append)
    stored = [step for step in steps if step.stored]  # type: ignore[attr-defined]
    assert len(stored) == 4 and all("text 1" in step.name for step in stored)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shifts": (16, 16)}, r"--shifts 16,16"),
        ({"tokens": 2}, r"--tokens 2"),
        ({"tokens": 8192}, r"8,192 tokens shifted by 272 .* trained on 4,096"),
        ({"settings": ()}, r"at least one"),
    ],
)
def test_settings_that_cannot_be_measured(
    change: dict[str, Any], message: str, model_folder: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_first_token_settings(replace(FirstTokenSettings(model_folder), **change))


def result(name: str, total: float = 1.0, **spot: float) -> ArmResult:
    first = {"share": 0.3, "mass": 0.4, "score_ratio": 1.0, **spot}
    values = {"tokens": 1000, "total": {"entry": {"weighted": total}}, "spots": {"first": first}}
    return ArmResult("pretrained:bf16", name, 1, values)


def test_readings_flip_with_the_numbers() -> None:
    def reading(*results: ArmResult) -> str:
        return " ".join(first_token_readings(results))

    assert "Sink mass" in reading(result("plain"))
    assert "A larger logit error" in reading(result("plain", mass=0.001, score_ratio=2.0))
    assert "Both" in reading(result("plain", score_ratio=2.0))
    flat = reading(result("plain", share=0.001), result("token:eos", share=0.31))
    assert "less than 3 equal shares" in flat and "another first token" not in flat
    same = reading(result("plain"), result("token:eos", share=0.31))
    other = reading(result("plain"), result("token:eos", share=0.1))
    assert "the place that counts" in same and "the token counts" in other
    assert "deviate as before" in reading(result("plain"), result("excluded", total=0.7))
    assert "deviate more" in reading(result("plain"), result("excluded", total=1.2))
    assert "deviate less" in reading(result("plain"), result("excluded", total=0.2))
    assert "keeps its share" in reading(result("plain"), result("gap:8", share=0.3))
    assert "changes its share" in reading(result("plain"), result("gap:8", share=0.1))


def test_means_over_texts_are_means(model_folder: str) -> None:
    from anchorcontext.precision.first_token.measure import _mean

    values = [{"a": 1.0, "b": {"c": [1.0, 2.0]}}, {"a": 3.0, "b": {"c": [3.0, 6.0]}}]
    assert _mean(values) == {"a": 2.0, "b": {"c": [2.0, 4.0]}}
    assert np.isclose(_mean(values[:1])["a"], 1.0)
