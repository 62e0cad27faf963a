"""diagnose rope: heads before their rotation, stored units, casts, and what is read from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from anchorcontext.errors import UserError
from anchorcontext.precision import LayerAttention, Variant, Workers, walk
from anchorcontext.precision.rope.casting import CastResult, measure_casts
from anchorcontext.precision.rope.measure import (
    RopeSettings,
    Split,
    capture,
    check_rope_settings,
    rope_units,
    run_rope,
    spread,
    stored_splits,
)
from anchorcontext.precision.rope.parts import Parts
from anchorcontext.precision.rope.sheet import cast_readings, rope_readings
from anchorcontext.precision.rope.stages import STAGES, parse_stack, rotate
from anchorcontext.testing.models import tiny_model

IDS = torch.arange(40) * 37 % 128


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_captured_heads_rotate_into_the_stock_ones(model_type: str) -> None:
    model = tiny_model(model_type, dtype=torch.bfloat16).eval()
    positions = torch.arange(40)
    with Workers(1) as workers:
        heads = dict(capture(model, None, IDS, (0, 1), workers))
        stock: list[LayerAttention] = [
            states.attention[0]
            for states in walk(model, IDS, [Variant(positions)], workers=workers)
        ]
    stack = parse_stack("sdpa:bf16")
    for layer in (0, 1):
        for head in range(4):
            ours = rotate(heads[layer].query[head], positions, heads[layer], stack)
            wrong = ours != stock[layer].query[head].double()
            assert wrong.float().mean() < 0.005
        assert torch.equal(heads[layer].value, stock[layer].value.double())


def small(model_folder: str, documents: str) -> RopeSettings:
    return check_rope_settings(
        RopeSettings(
            model_folder,
            sources=("bf16", "normal"),
            layers=(1,),
            stacks=("sdpa:bf16", "all:fp32"),
            offsets=(1024, 0),
            tokens=24,
            heads=2,
            source=documents,
        )
    )


def test_a_killed_run_goes_on(model_folder: str, documents: str, tmp_path: Path) -> None:
    settings = small(model_folder, documents)
    assert settings.sources == ("pretrained:bf16", "normal") and settings.offsets == (0, 1024)
    done: list[str] = []

    class Killed(Exception):
        pass

    def kill_after_three(step: object) -> None:
        if step.stored:  # type: ignore[attr-defined]
            done.append(step.name)  # type: ignore[attr-defined]
            if len(done) == 3:
                raise Killed

    with Workers(1) as workers:
        with pytest.raises(Killed):
            run_rope(settings, tmp_path, workers=workers, tell=kill_after_three)
        files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
        assert len(files) == 3
        run_rope(settings, tmp_path, workers=workers)
        assert all(path.stat().st_mtime_ns == time for path, time in files.items())
        splits, bands, made = stored_splits(settings, tmp_path)
        # By bands: near, near with pairs turned, and far.
        assert len(splits) == 8 and len(bands) == 2 * 3 and len(made) == 1
        assert len(rope_units(settings)) == 8 + 6
        again = tmp_path / "again"
        run_rope(settings, again, workers=workers)
    for one, two in zip(splits, stored_splits(settings, again)[0], strict=True):
        assert (one.parts.ordered == two.parts.ordered).all()
    other = replace(settings, shift=17)
    assert stored_splits(other, tmp_path)[0] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": (7,)}, r"--layers 7.*0 to 1"),
        ({"sources": ("int8",)}, r"int8"),
        ({"stacks": ()}, r"at least one"),
        ({"offsets": ()}, r"--offsets nothing"),
        ({"shift": 0}, r"--shift 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    change: dict[str, object], message: str, model_folder: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_rope_settings(replace(RopeSettings(model_folder), **change))  # type: ignore[arg-type]


def test_heads_are_spread() -> None:
    assert spread(9, 3) == [0, 4, 8]
    assert spread(2, 3) == [0, 1]


def test_casts_that_round_and_casts_that_keep() -> None:
    """Hazard 24, without DeepSpeed's two processes."""
    found = {cast.route: cast for cast in measure_casts(deepspeed=False)}
    rounded = {route for route, cast in found.items() if not cast.kept}
    assert rounded == {
        "model.to(torch.bfloat16)",
        "model.bfloat16()",
        "model.half()",
        "model.bfloat16().float()",
    }
    assert found["model.bfloat16().float()"].dtype == "float32"
    assert found["model.to(torch.bfloat16)"].radians > 50
    assert found["anchorcontext TrainModel(model).to(torch.bfloat16)"].relative_error < 1e-7


def split_of(stack: str, offset: int, shares: dict[str, float], total: float) -> Split:
    ordered = np.zeros((2, 3, len(STAGES)))
    for stage, share in shares.items():
        ordered[..., STAGES.index(stage)] = share * total
    alone = np.sqrt(ordered * total)
    parts = Parts(np.full((2, 3), total), alone, ordered, np.zeros(3))
    return Split("normal", 0, 0, stack, offset, parts)


def test_readings_follow_the_numbers() -> None:
    def readings(tables: float, far: float, remedy: float) -> str:
        shares = {"tables": tables, "rotation": 1 - tables}
        return " ".join(
            rope_readings(
                [
                    split_of("sdpa:bf16", 0, shares, 1.0),
                    split_of("sdpa:bf16", 1024, shares, far),
                    split_of("tables-fp32:bf16", 0, {"operands": 1.0}, remedy),
                ],
                16,
            )
        )

    one = readings(0.8, 1.0, 0.5)
    assert "80% comes from tables, 20% comes from rotation" in one
    assert "stays within" in one and "tables-fp32:bf16 leaves least" in one
    other = readings(0.05, 4.0, 0.9)
    assert "95% comes from rotation" in other and "comes from tables" not in other
    assert "grows 4 times" in other and "none is below" in other


def test_cast_readings_follow_the_numbers() -> None:
    kept, lost = CastResult("a()", "float32", 0.0, 0.0), CastResult("b()", "bfloat16", 4e-3, 500.0)
    assert "inv_freq is kept by every route." in cast_readings([kept])
    assert any("rounded by b(): up to 500 radians" in r for r in cast_readings([kept, lost]))
