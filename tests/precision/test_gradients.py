"""diagnose gradients: equal where nothing differs, apart where something does, readings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from anchorcontext.cli.diagnose import command
from anchorcontext.errors import UserError
from anchorcontext.model import TrainModel, enable
from anchorcontext.model.memory import checkpoint_layers
from anchorcontext.precision.gradients.compare import (
    Apart,
    TextGradients,
    compare,
    group_of,
    layer_of,
    text_gradients,
    total,
)
from anchorcontext.precision.gradients.measure import (
    GradientArm,
    GradientResult,
    GradientSettings,
    check_gradient_settings,
    run_gradients,
    stored_gradients,
)
from anchorcontext.precision.gradients.sheet import gradient_readings
from anchorcontext.testing.models import tiny_llama

IDS = torch.arange(48) * 37 % 128


def gradients(
    dtype: torch.dtype = torch.float32, shift: int = 0, checkpointed: bool = False
) -> TextGradients:
    model = enable(tiny_llama(dtype=dtype))
    if checkpointed:
        checkpoint_layers(model)
    return text_gradients(TrainModel(model).train(), IDS, shift)


def test_they_are_those_of_stock_transformers() -> None:
    found = gradients()
    model = tiny_llama()
    projected: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: object, inputs: object, out: torch.Tensor) -> None:
            def store(grad: torch.Tensor) -> None:
                projected[name] = grad[0]

            out.register_hook(store)

        return hook

    for index, layer in enumerate(model.model.layers):
        layer.self_attn.q_proj.register_forward_hook(keep(f"layers.{index}.dq"))
        layer.self_attn.k_proj.register_forward_hook(keep(f"layers.{index}.dk"))
    loss = model(input_ids=IDS[None], labels=IDS[None], use_cache=False).loss
    loss.backward()
    assert math.isclose(found.loss, float(loss.detach()), rel_tol=1e-6)
    reference = TextGradients(0.0, {n: p.grad for n, p in model.named_parameters()}, projected)
    assert len(found.parameters) == 21 and set(found.heads) == set(projected)
    apart = compare(found, reference)
    assert all(one.relative < 1e-5 for one in apart.values())


def test_equal_runs_have_equal_gradients_with_layers_recomputed_or_not() -> None:
    reference = gradients()
    for again in (gradients(), gradients(checkpointed=True)):
        apart = compare(again, reference)
        assert all(one.difference == 0 for one in apart.values())
        assert total(apart).relative == 0 and total(apart).cosine == pytest.approx(1, abs=1e-12)


def test_a_shift_moves_fp32_by_rounding_only_and_bf16_by_more() -> None:
    reference = gradients()
    fp32 = compare(gradients(shift=16), reference)
    plain = gradients(torch.bfloat16)
    bf16 = compare(gradients(torch.bfloat16, shift=16), plain)
    assert 0 < total(fp32).relative < 1e-5 < 1e-3 < total(bf16).relative
    # Before RoPE dq and dk do not turn with the positions.
    for head in ("dq", "dk"):
        assert total(fp32, group=head).relative < 1e-5
    assert 1e-3 < total(compare(plain, reference)).relative < 0.1


def test_sums_add_up_over_groups_and_layers() -> None:
    apart = compare(gradients(torch.bfloat16), gradients())
    groups = ("embedding", "q", "k", "v", "o", "mlp", "norms")
    parts = sum((total(apart, group=group) for group in groups), Apart())
    assert parts.difference == pytest.approx(total(apart).difference, rel=1e-12)
    assert {group_of(name) for name in apart} == {*groups, "dq", "dk"}
    assert layer_of("model.layers.1.mlp.up_proj.weight") == 1 and layer_of("lm_head.weight") is None
    one = total(apart, layer=1, group="dq")
    assert one == apart["layers.1.dq"]


def test_apart_in_numbers() -> None:
    own, reference = torch.tensor([3.0, 4.0]), torch.tensor([4.0, 3.0])
    apart = compare(TextGradients(0, {"x": own}), TextGradients(0, {"x": reference}))["x"]
    assert (apart.cosine, apart.norm_ratio) == (24 / 25, 1.0)
    assert apart.relative == pytest.approx(math.sqrt(2) / 5)


def test_arms_are_parsed() -> None:
    assert GradientArm.parse("bf16+rotation+rope_tables@16") == GradientArm(
        "bf16", ("rope_tables", "rotation"), 16
    )
    assert str(GradientArm.parse("bf16@0")) == "bf16"
    for wrong in ("fp64", "bf16+norms", "bf16@x", "fp32+qk", "bf16+weights", "bf16+rope_tables"):
        with pytest.raises(UserError, match=r"arm"):
            GradientArm.parse(wrong)


def test_a_stopped_run_goes_on(model_folder: str, documents: str, tmp_path: Path) -> None:
    settings = check_gradient_settings(
        GradientSettings(
            model_folder,
            arms=("fp32@16", "bf16", "bf16@16", "bf16+rope_tables+rotation+qk", "fp32+weights"),
            tokens=32,
            texts=1,
            source=documents,
        )
    )
    first = replace(settings, arms=("bf16", "bf16@16"))
    run_gradients(first, tmp_path)
    steps: list[Any] = []
    run_gradients(settings, tmp_path, tell=steps.append)
    assert [step.name for step in steps] == [
        "fp32@16 text 0",
        "bf16+rope_tables+rotation+qk text 0",
        "fp32+weights text 0",
    ]
    results, _ = stored_gradients(settings, tmp_path)
    found = {r.arm: r for r in results}
    assert list(found["bf16@16"].against) == ["fp32", "unshifted"]

    def away(arm: str, against: str = "fp32") -> float:
        return total(found[arm].against[against][0]).relative

    # The reference has the weights of bf16: with those of the checkpoint fp32 differs.
    assert away("fp32@16") < 1e-5 < away("fp32+weights")
    assert away("bf16+rope_tables+rotation+qk") < away("bf16")
    options = f"gradients {model_folder} --arms bf16,bf16@16 --tokens 32 --texts 1 --stored"
    options += f" --source {documents} --out {tmp_path} --markdown {tmp_path / 'page.md'}"
    ran = CliRunner().invoke(command, options.split())
    assert ran.exit_code == 0, ran.output
    page = (tmp_path / "page.md").read_text()
    assert "<!-- begin gradients -->" in page and "gradients-layers.png" in page


def result(arm: str, relative: float, unshifted: float | None = None) -> GradientResult:
    def by(size: float) -> list[dict[str, Apart]]:
        return [{"model.layers.0.self_attn.q_proj.weight": Apart(1.0, 1.0, 1.0, size**2)}]

    against = {"fp32": by(relative)}
    if unshifted is not None:
        against["unshifted"] = by(unshifted)
    return GradientResult(arm, [2.0], against)


def test_readings_flip_with_the_numbers() -> None:
    def reading(*results: GradientResult) -> str:
        return " ".join(gradient_readings(results))

    plain = result("bf16", 0.04)
    helped = reading(plain, result("bf16+rotation", 0.03), result("bf16+qk", 0.02))
    assert "qk comes nearest, 50% nearer" in helped
    lucky = reading(plain, result("bf16@16", 0.02, 0.03), result("bf16+qk", 0.03))
    assert "changes such distances by up to 50%: no control is told from chance" in lucky
    assert "none comes 5% nearer" in reading(plain, result("bf16+rotation", 0.039))
    assert "bf16 arithmetic does more" in reading(plain, result("fp32+weights", 0.01))
    assert "rounding the weights to bf16 does more" in reading(plain, result("fp32+weights", 0.2))
    assert "the dtype does more" in reading(plain, result("bf16@16", 0.04, 0.01))
    assert "the shift does more" in reading(plain, result("bf16@16", 0.04, 0.1))
