"""``diagnose shift``: what it measures, what it keeps, and that it goes on where it was killed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anchorcontext.errors import UserError
from anchorcontext.precision import Setting, Variant, Workers, lab_model, read_config, walk
from anchorcontext.precision.sheet import save_figures, sheet_markdown
from anchorcontext.precision.shift.figures import draw_shift
from anchorcontext.precision.shift.measure import measure, run_shift, stored_results
from anchorcontext.precision.shift.settings import (
    PAPER_SHIFTS,
    PRESETS,
    ShiftSettings,
    Walk,
    check_settings,
)
from anchorcontext.precision.shift.sheet import shift_sheet
from anchorcontext.precision.shift.store import ResultStore
from anchorcontext.precision.shift.summary import summarise, summary_report
from anchorcontext.precision.units import Step
from anchorcontext.testing.models import tiny_llama


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers(1) as pool:
        yield pool


@pytest.fixture
def settings(short_model: Path, corpus: Path) -> ShiftSettings:
    return ShiftSettings(
        model=str(short_model),
        settings=(Setting("pretrained", "bf16"), Setting("random", "bf16")),
        beside=(Setting("pretrained", "fp64"),),
        beside_tokens=32,
        shifts=(0, 16, 100),
        tokens=64,
        lengths=(8, 32, 96),
        texts=2,
        source=str(corpus),
    )


def tensors(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    """Every stored array but the facts, by file."""
    found = {}
    for path in sorted(folder.rglob("*.npz")):
        with np.load(path) as arrays:
            kept = {name: arrays[name] for name in arrays.files if name != "facts"}
        found[str(path.relative_to(folder))] = kept
    return found


class Killed(Exception):
    """In place of a signal."""


def test_a_killed_run_goes_on_to_the_same_numbers(
    settings: ShiftSettings, workers: Workers, tmp_path: Path
) -> None:
    told: list[Step] = []

    def kill(progress: Step) -> None:
        told.append(progress)
        if progress.name.startswith("text 1 "):
            raise Killed

    with pytest.raises(Killed):
        run_shift(settings, tmp_path / "killed", workers=workers, tell=kill)
    stored = sum(progress.stored for progress in told)
    assert len(tensors(tmp_path / "killed")) == stored == len(settings.walks())
    # A file that was cut short, and one that a killed writer left beside, count for nothing.
    first = next((tmp_path / "killed").rglob("*.npz"))
    first.write_bytes(first.read_bytes()[:200])
    first.with_name("text-009.npz.1.part").write_bytes(b"")

    again: list[Step] = []
    run_shift(settings, tmp_path / "killed", workers=workers, tell=again.append)
    assert sum(progress.stored for progress in again) == len(settings.walks()) + 1
    assert again[-1].done == pytest.approx(again[-1].total)

    run_shift(settings, tmp_path / "whole", workers=workers)
    killed, whole = tensors(tmp_path / "killed"), tensors(tmp_path / "whole")
    assert killed.keys() == whole.keys()
    for name, arrays in whole.items():
        for key, array in arrays.items():
            np.testing.assert_array_equal(array, killed[name][key], err_msg=f"{name} {key}")

    more: list[Step] = []
    settings = replace(settings, texts=3)
    run_shift(settings, tmp_path / "whole", workers=workers, tell=more.append)
    assert all(progress.name.startswith("text 2 ") for progress in more)


def test_what_is_reported_stands_on_texts_that_all_settings_have(
    settings: ShiftSettings, workers: Workers, tmp_path: Path
) -> None:
    run_shift(settings, tmp_path, workers=workers)
    next(tmp_path.glob("random-bf16-shift-*/text-001.npz")).unlink()
    results = stored_results(settings, tmp_path)
    assert {w.kind: len(found) for w, found in results.items()} == {"length": 2, "shift": 1}

    summary = summarise(settings, results)
    by_shift = next(curve for curve in summary.kind("shift"))
    assert by_shift.axis == [0, 16, 100]
    # Compared with shift 16, shift 16 differs by nothing at all.
    for form in ("signed", "column", "entry"):
        assert by_shift.totals(form, "weighted")[0][1] == 0
    assert by_shift.totals("entry", "weighted")[0][0] > 0.1
    floor = next(c for c in summary.kind("length") if c.setting.dtype == "fp64")
    assert 0 < floor.totals("entry", "weighted")[0].max() < 1e-11
    report: Any = summary_report(summary)
    assert report["texts"] == {"length": 2, "shift": 1}
    assert len(report["deviations"]) == 2 * 3 + 2 + 2 * 3


def test_the_sheet_says_what_its_numbers_stand_on(
    settings: ShiftSettings, workers: Workers, tmp_path: Path
) -> None:
    run_shift(settings, tmp_path, workers=workers)
    next(tmp_path.glob("random-bf16-shift-*/text-001.npz")).unlink()
    sheet = shift_sheet(summarise(settings, stored_results(settings, tmp_path)), command="C")
    titles = [table.title for table in sheet.tables]
    assert "against length, 2 texts (2 of corpus), shifts 0 and 16" in titles[0]
    assert "at 64 tokens, 1 of 2 texts (1 of corpus), compared with shift 16" in titles[-1]
    assert sheet.tables[0].headers == [
        "tokens",
        "pretrained:bf16",
        "random:bf16",
        "pretrained:fp64",
    ]
    assert [row[0] for row in sheet.tables[0].rows] == [8, 32, 96]
    assert all("±" in cell for cell in sheet.tables[0].rows[0][1:])
    assert sheet.tables[0].rows[2][3] is None  # fp64 beside, to 32 tokens
    assert [row[0] for row in sheet.tables[-1].rows] == [0, 16, 100]
    assert not any("±" in cell for row in sheet.tables[-1].rows for cell in row[1:])  # one text
    (made, cost) = sheet.made
    assert "CPU, torch" in made and made.endswith("threads: 1")
    assert "a text took" in cost and cost.endswith("of processor time")

    figure = tmp_path / "figures" / "shift-by-head.png"
    text = sheet_markdown(sheet, [figure], tmp_path)
    assert text.startswith("## Shift invariance") and made in text and cost in text
    assert "![shift by head](figures/shift-by-head.png)" in text


def test_results_of_the_first_version_stay_readable(
    settings: ShiftSettings, workers: Workers, tmp_path: Path
) -> None:
    """They hold the parts of "made" one by one, and no seconds of the processor."""
    settings = replace(settings, panels=("length",), beside=(), texts=1)
    run_shift(settings, tmp_path, workers=workers)
    before = summarise(settings, stored_results(settings, tmp_path))
    store = ResultStore(tmp_path)
    for todo, (found,) in stored_results(settings, tmp_path).items():
        kept = {name: found.facts[name] for name in ("text", "domain", "document", "digest")}
        versions = {"torch": "2.0", "transformers": "5.0", "date": "2026-01-02"}
        machine = {"threads": 2, "device": "cpu", "machine": "x86_64", "seconds": 90.0}
        path = next(tmp_path.glob(f"{str(todo.setting).replace(':', '-')}-*/text-000.npz"))
        store.save(path, todo, replace(found, facts={**kept, **versions, **machine}))
    after = summarise(settings, stored_results(settings, tmp_path))
    assert after.made == ["x86_64 CPU, torch 2.0, 2026-01-02, transformers 5.0, threads: 2"]
    assert after.seconds == 180 and after.processor_seconds is None
    assert shift_sheet(after, command="C").tables == shift_sheet(before, command="C").tables
    told: list[Step] = []
    run_shift(settings, tmp_path, workers=workers, tell=told.append)
    assert not told


def test_the_same_picture_is_the_same_file(
    settings: ShiftSettings, workers: Workers, tmp_path: Path
) -> None:
    settings = replace(settings, panels=("shift",), texts=1)
    run_shift(settings, tmp_path, workers=workers)
    summary = summarise(settings, stored_results(settings, tmp_path))
    drawn = [save_figures(draw_shift(summary), tmp_path / name) for name in ("one", "two")]
    assert [path.name for path in drawn[0]] == ["shift-by-shift.png", "shift-by-head.png"]
    for one, two in zip(*drawn, strict=True):
        assert one.read_bytes() == two.read_bytes()
        assert one.with_suffix(".svg").read_bytes() == two.with_suffix(".svg").read_bytes()


def test_other_settings_lie_beside(
    settings: ShiftSettings, workers: Workers, tmp_path: Path
) -> None:
    settings = replace(settings, settings=(Setting("pretrained", "bf16"),), beside=(), texts=1)
    variants = [
        settings,
        replace(settings, scores="model"),
        replace(settings, same_input=True),
        replace(settings, shifts=(0,)),
    ]
    for variant in variants:
        run_shift(variant, tmp_path, workers=workers)
    totals = []
    for variant in variants:
        curve = summarise(variant, stored_results(variant, tmp_path)).kind("shift")[0]
        totals.append(curve.totals("entry", "weighted")[0][0])
    assert totals[0] == totals[3]
    assert totals[1] > totals[0]  # rounded scores and probabilities differ more
    assert totals[2] < totals[0]  # layers do not inherit


@pytest.mark.parametrize("length", [8, 32])
def test_a_length_inside_a_longer_walk_is_that_length_alone(
    length: int, settings: ShiftSettings, workers: Workers
) -> None:
    ids = torch.arange(96) * 31 % 300
    setting = Setting("pretrained", "fp64")
    with lab_model(settings.model, setting, workers=workers, longest=96) as (model, _):
        found = [
            measure(
                model,
                ids,
                Walk(setting, "length", 16, (0,), lengths),
                workers=workers,
                # The stock fp32 tables: a deviation above fp64's noise, so that it must agree.
                rotary=None,
            )[0, length]
            for lengths in ((8, 32, 96), (length,))
        ]
    inside, alone = found
    assert alone.total() > 1e-7
    np.testing.assert_allclose(inside.heads, alone.heads, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(inside.columns, alone.columns, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(inside.logits, alone.logits, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(inside.mass, alone.mass, rtol=1e-6)


@pytest.mark.parametrize("shift", [3, 40])
def test_it_is_the_difference_of_transformers_own_attention_matrices(
    shift: int, settings: ShiftSettings, workers: Workers
) -> None:
    """In the first layer, where eager attention and ``sdpa`` have the same input."""
    setting, ids = Setting("pretrained", "bf16"), torch.arange(64) * 31 % 300
    with lab_model(settings.model, setting, workers=workers, longest=64) as (model, _):
        todo = Walk(setting, "shift", 16, (0, shift), (64,))
        found = measure(model, ids, todo, workers=workers, scores="model")[shift, 64]
        model.set_attn_implementation("eager")
        first, second = (
            model(
                input_ids=ids[None],
                position_ids=torch.arange(64)[None] + by,
                use_cache=False,
                output_attentions=True,
            )
            .attentions[0][0]
            .double()
            for by in (16, shift)
        )
    rows = torch.arange(64, 0, -1)
    difference = second - first
    columns = {
        "signed": difference.sum(1),
        "column": difference.sum(1).abs(),
        "entry": difference.abs().sum(1),
    }
    for number, form in enumerate(columns.values()):
        np.testing.assert_allclose(found.heads[number, 0, 0], (form / rows).sum(1), atol=1e-6)
        np.testing.assert_allclose(found.heads[number, 1, 0], form.sum(1), atol=1e-5)
    assert columns["entry"].sum() > 0.1


def test_deviations_add_up(settings: ShiftSettings, workers: Workers) -> None:
    """Heads, columns and bins are the same sum, cut differently."""
    setting = Setting("pretrained", "bf16")
    with lab_model(settings.model, setting, workers=workers, longest=64) as (model, _):
        found = measure(
            model,
            torch.arange(64) * 31 % 300,
            Walk(setting, "shift", 16, (0,), (64,)),
            workers=workers,
        )[0, 64]
    weighted = found.heads[:, 0].sum((1, 2))
    np.testing.assert_allclose(found.columns.sum(1), weighted, rtol=1e-12)
    np.testing.assert_allclose(found.layer_columns[0].sum((1, 2)), weighted, rtol=1e-12)
    np.testing.assert_allclose(found.columns[:, 0], found.first[:, 0].sum((1, 2)), rtol=1e-12)
    plain = (found.columns * np.arange(64, 0, -1)).sum(1)
    np.testing.assert_allclose(plain, found.heads[:, 1].sum((1, 2)), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.mass[0], found.layer_mass.mean(), rtol=1e-12)
    rows = np.arange(64, 0, -1)
    assert (found.mass * rows).sum() == pytest.approx(64, rel=1e-6)


def test_drift_of_fp32_grows_with_the_offset_as_calibrated(workers: Workers) -> None:
    """Largest difference of logits from offset 0, on a tiny model with peaked attention.

    fp32 angles of position p are off by up to p x 6e-8, so the drift grows in proportion once that
    is more than the rounding of everything else. In fp64 it is the same curve, 2^-29 lower.
    """
    ids, positions = torch.arange(64) * 37 % 128, torch.arange(64)
    model = tiny_llama(initializer_range=0.15, max_position_embeddings=300_000).eval()
    wanted = {1: 1e-5, 1024: 7e-5, 16384: 1.6e-3, 131072: 1e-2}
    variants = [Variant(positions + offset) for offset in (0, *wanted)]
    for states in walk(model, ids, variants, workers=workers):
        hidden = states.hidden
    with torch.no_grad():
        base, *logits = (model.lm_head(model.get_decoder().norm(x)) for x in hidden)
    for (offset, value), shifted in zip(wanted.items(), logits, strict=True):
        drift = float((shifted - base).abs().max())
        assert value / 4 < drift < value * 4, f"offset {offset}: {drift:.2g}, about {value:.2g}"


def test_the_random_twin_is_one_model_in_every_dtype(
    settings: ShiftSettings, workers: Workers
) -> None:
    weights = {}
    for dtype in ("fp32", "bf16"):
        setting = Setting("random", dtype)
        with lab_model(settings.model, setting, workers=workers, longest=64, seed=3) as (model, _):
            weights[dtype] = model.get_decoder().layers[0].mlp.up_proj.weight
    assert torch.equal(weights["fp32"].bfloat16(), weights["bf16"])
    setting = Setting("pretrained", "fp32")
    with lab_model(settings.model, setting, workers=workers, longest=64) as (model, _):
        assert not torch.equal(model.get_decoder().layers[0].mlp.up_proj.weight, weights["fp32"])


def test_the_preset_paper_has_the_papers_numbers() -> None:
    paper = PRESETS["paper"]
    assert (paper.reference, paper.tokens, paper.texts) == (16, 4096, 50)
    assert len(PAPER_SHIFTS) == 19 and {0, 15, 17, 2000} <= set(PAPER_SHIFTS)
    assert paper.lengths[0] == 64 and paper.lengths[-1] == 8192
    assert list(map(str, paper.settings)) == ["pretrained:bf16", "pretrained:fp32", "random:bf16"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 1}, "--tokens 1: give whole numbers from 2 on"),
        ({"lengths": (1, 8)}, "--lengths 1"),
        ({"shifts": ()}, "--shifts nothing"),
        ({"shifts": (-1,)}, "--shifts -1"),
        ({"texts": 0}, "--texts 0"),
        ({"panels": ("heads",)}, "--panels heads: choose from shift, token, length"),
        ({"settings": (), "beside": ()}, "--settings is empty"),
        ({"shifts": (0, 590)}, "need positions up to 653; .* was trained on 600"),
        ({"lengths": (8, 590)}, "590 tokens shifted by 16 need positions up to 605"),
        ({"device": "cuda"}, "torch sees no GPU"),
    ],
)
def test_settings_that_cannot_be_measured_are_refused(
    changes: dict[str, Any], message: str, settings: ShiftSettings
) -> None:
    if "device" in changes and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match=message):
        check_settings(replace(settings, **changes))


def test_positions_past_the_trained_length_are_measured_on_request(settings: ShiftSettings) -> None:
    changed = replace(settings, shifts=(590, 0), extrapolate=True)
    assert check_settings(changed).shifts == (0, 590)


@pytest.mark.parametrize("text", ["bf17", "trained:bf16", "random:", ""])
def test_unknown_settings_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="give weights"):
        Setting.parse(text)


def test_a_model_with_learned_positions_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "attn_pdrop": 0}')
    with pytest.raises(UserError, match=r"gpt2 model .*positions must come from"):
        read_config(str(tmp_path), 64)
