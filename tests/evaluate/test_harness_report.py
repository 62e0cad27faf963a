"""Tables of scores: means over tasks and snapshots by hand, the paper's rows marked as theirs."""

import pytest

from anchorcontext.evaluate.harness import units
from anchorcontext.evaluate.harness.catalog import PRESETS
from anchorcontext.evaluate.harness.progress import Progress
from anchorcontext.evaluate.harness.report import markdown, score_rows, summarize
from anchorcontext.evaluate.harness.run import Findings
from anchorcontext.evaluate.harness.units import UnitResult, UnitStore, fingerprint, read_score


def unit(task="niah_single_1", length=4096, score=50.0, model="step-1", **changes) -> UnitResult:
    values = {
        "metric": "string match",
        "stderr": None,
        "samples": 10,
        "requested": 10,
        "prompt_tokens": 1.0,
        "longest": 1,
        "sized_for": length,
        "batch_size": 1,
        "seconds": 1.0,
        "texts": {},
        "fingerprint": "f",
        "versions": {},
    }
    return UnitResult(model=model, task=task, length=length, score=score, **values | changes)


def test_mean_and_spread_over_five_snapshots():
    scores = [10.0, 20.0, 30.0, 40.0, 60.0]
    findings = Findings([unit(score=s, model=f"step-{i}") for i, s in enumerate(scores)])
    cell = summarize(findings).scores["niah_single_1"]["4096"]
    # Mean 32; squared deviations 484 + 144 + 4 + 64 + 784 = 1480; / 4 = 370.
    assert cell.mean == 32
    assert cell.spread == pytest.approx(370**0.5)
    assert str(cell) == "32.00 ± 19.24"


def test_the_mean_over_tasks_is_taken_per_snapshot():
    """Its spread is that of the snapshots' means, not of the tasks."""
    one = [unit("ruler_vt", score=10.0), unit("ruler_fwe", score=30.0)]
    two = [unit("ruler_vt", score=30.0, model="b"), unit("ruler_fwe", score=50.0, model="b")]
    cell = summarize(Findings(one + two)).scores["these 2 tasks"]["4096"]
    assert (cell.mean, cell.spread) == (30, pytest.approx(200**0.5))


def test_presets_have_a_mean_only_when_all_their_tasks_ran():
    tasks = PRESETS["ruler-13"]
    units = [unit(task, score=float(i)) for i, task in enumerate(tasks)]
    scores = summarize(Findings(units)).scores
    assert scores["ruler-13"]["4096"].mean == sum(range(13)) / 13
    kept = [i for i, task in enumerate(tasks) if task in PRESETS["ruler-11"]]
    assert scores["ruler-11"]["4096"].mean == pytest.approx(sum(kept) / 11)
    without = [u for u in units if u.task != "ruler_vt"]
    assert not {"ruler-13", "ruler-11"} & set(summarize(Findings(without)).scores)


def test_a_length_that_lacks_a_task_has_no_mean():
    units = [unit("ruler_vt"), unit("ruler_fwe"), unit("ruler_vt", length=8192)]
    assert set(summarize(Findings(units)).scores["these 2 tasks"]) == {"4096"}


def test_the_papers_rows_stand_below_ours_and_are_marked():
    tasks = PRESETS["ruler-11"]
    units = [unit(task, length) for task in tasks for length in (1000, 4000, 4096)]
    report = summarize(Findings(units, {"mmlu": "no data"}))
    headers, rows = score_rows(report)
    assert headers == ["RULER", "1,000", "4,000", "4K"]
    assert rows[0] == ["NIAH-Single-1", "50.00", "50.00", "50.00"]
    assert rows[11][0] == "mean, ruler-11"
    assert ["paper: anchor", "–", "90.60", "90.60"] in rows[12:]
    text = markdown(report)
    assert "not measured here" in text.replace("\n", " ")
    assert "Not run: mmlu: no data." in text


def test_the_papers_rows_are_left_out_where_other_tasks_were_measured():
    assert "paper" not in markdown(summarize(Findings([unit(), unit("ruler_vt")])))


def test_texts_that_are_not_the_published_ones_are_named():
    report = summarize(Findings([unit("niah_single_2", texts={"haystack": "mine.txt"})]))
    assert "mine.txt, not the published one" in markdown(report)


def test_tasks_without_a_length_have_a_table_of_their_own():
    text = markdown(summarize(Findings([unit("mmlu", length=None, metric="acc")])))
    assert "| mmlu | acc | 50.00 |" in text
    assert "RULER" not in text


def test_what_some_snapshots_lack_is_shown_of_each_and_in_no_mean():
    both = [unit("ruler_vt", score=10.0, model="a"), unit("ruler_vt", score=30.0, model="b")]
    some = [
        unit("hellaswag", length=None, score=40.0, model="a"),
        unit("ruler_fwe", score=70.0, model="b"),
        unit("ruler_vt", length=8192, score=20.0, model="b"),
    ]
    report = summarize(Findings(both, earlier=some).with_earlier(2))
    assert set(report.scores) == {"ruler_vt"} and set(report.scores["ruler_vt"]) == {"4096"}
    lines = [line for line in markdown(report).splitlines() if line[:3] not in ("", "| :")]
    assert [line for line in lines if line.startswith("|")] == [
        "| RULER | 4K |",
        "| VT | 20.00 ± 14.14 |",
        "| task | tokens | a | b |",
        "| VT | 8K | – | 20.00 |",
        "| FWE | 4K | – | 70.00 |",
        "| hellaswag | – | 40.00 | – |",
    ]


def test_a_groups_score_and_samples_are_read_from_the_harness():
    results = {
        "results": {
            "mmlu": {"acc,none": 0.25, "acc_stderr,none": 0.01, "alias": "mmlu"},
            "mmlu_a": {"acc,none": 0.5},
        },
        "n-samples": {"mmlu_a": {"effective": 3}, "mmlu_b": {"effective": 4}},
        "group_subtasks": {"mmlu": ["mmlu_a", "mmlu_b"]},
    }
    assert read_score(results, "mmlu", None) == (25.0, 1.0, "acc", 7)


def test_a_stored_unit_returns_only_under_its_own_circumstances(tmp_path):
    store = UnitStore(tmp_path)
    mark = fingerprint({"samples": 10, "dtype": "bf16"})
    result = unit(fingerprint=mark)
    store.save(result)
    assert store.load("step-1", "niah_single_1", 4096, mark) == result
    other = fingerprint({"samples": 10, "dtype": "fp32"})
    assert store.load("step-1", "niah_single_1", 4096, other) is None
    (tmp_path / "step-1" / "niah_single_1-4096" / "unit.json").write_text('{"half":')
    assert store.load("step-1", "niah_single_1", 4096, mark) is None


def test_progress_tells_what_is_left_by_tokens():
    said: list[str] = []
    progress = Progress([1000, 1000, 2000], said.append)
    progress.skip(1000)
    progress.step(1000, "m: t @ 1,000", unit(seconds=90.0))
    assert said == ["[2/3] m: t @ 1,000: 50.00 in 0:01:30, about 0:03:00 left"]


def test_versions_leave_out_what_is_not_installed(monkeypatch):
    monkeypatch.setattr(units, "VERSIONS", ("torch", "no-such-package"))
    assert list(units.versions()) == ["torch"]
