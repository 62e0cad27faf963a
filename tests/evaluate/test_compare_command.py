"""`compare`: what differs in the configs, cost and scores of runs, in a table and on a page."""

import json
import shutil

import pytest
from click.testing import CliRunner

from anchorcontext.cli import group
from anchorcontext.config import save_config
from anchorcontext.errors import UserError
from anchorcontext.evaluate.comparable import OTHER_TOKENIZERS
from anchorcontext.evaluate.compare import compare_runs
from anchorcontext.watch.jsonl import JsonlSink
from anchorcontext.watch.metrics import LocalStep, make_record


@pytest.fixture
def arm(tiny, tmp_path):
    """Make a run's folder: two steps, an evaluation, results of two snapshots of ``vt``."""

    def make(name, mode="anchor", loss=3.0, vt=(60.0, 70.0), **sections):
        folder = tmp_path / name
        sink = JsonlSink(folder / "metrics.jsonl")
        for step in (1, 2):
            share = LocalStep(
                loss_sum=10 * (loss - step / 10),
                loss_tokens=10,
                tokens=400 * step,
                seconds=2.0,
                bytes_sent=2**20,
                peak_memory_bytes=step * 2**20,
            )
            sink.log(make_record([share, share], step=step, lr=0.1, grad_norm=1.0))
        values = {"held_out/64": loss, "niah_single/60": 0.5, "niah_single/64": 0.25}
        values["held_out/32"] = float("nan")  # diverged: no figure, and nothing breaks
        sink.evaluation(2, {**values, "loss_by_position/0-64": loss}, 1.0)
        sink.close()
        config = tiny(run={"name": name}, attention={"mode": mode}, **sections)
        save_config(config, folder / "config.yaml")
        rows = [
            {
                "model": f"{name}-step-{n}",
                "task": "vt",
                "length": length,
                "score": score - length / 1024,
            }
            for n, score in enumerate(vt)
            for length in (4096, 8192)
        ]
        (folder / "evaluation").mkdir()
        (folder / "evaluation" / "results.json").write_text(
            json.dumps({"harness": {"results": rows}})
        )
        return folder

    return make


def test_costs_losses_scores_and_the_keys_that_differ(arm):
    found = compare_runs([arm("a"), arm("b", mode="full", loss=4.0, vt=(50.0, 52.0))])
    assert found.differences == {"attention.mode": ["anchor", "full"]}
    rows = {name: values for name, values, _ in found.rows}
    assert rows["training loss, last step"] == pytest.approx([2.8, 3.8])
    assert rows["tokens/s, median step"] == [600.0, 600.0]  # 800 and 1,600 tokens in 2 s
    assert rows["peak memory of a rank, MiB"] == [2.0, 2.0]
    assert rows["sent in attention, MiB a step"] == [2.0, 2.0]
    assert rows["last evaluation: held_out/64"] == [3.0, 4.0]
    assert "last evaluation: held_out/32" not in rows
    assert rows["vt/4096"] == [61.0, 47.0]
    assert found.arms[1].score_curve("vt") == [(4096, 47.0), (8192, 43.0)]
    assert found.arms[0].score_curve("niah_single") == [(60, 0.5), (64, 0.25)]
    assert found.arms[0].position_curve() == [(64, 3.0)]


def test_the_command_prints_and_writes_a_table_and_one_page(arm, tmp_path):
    other = {"path": "elsewhere", "tokenizer": "other"}
    folders = [str(arm("a")), str(arm("b", mode="full", data=other))]
    page, text, report = (tmp_path / name for name in ("c.html", "c.md", "c.json"))
    arguments = ["--html", page, "--markdown", text, "--json", report]
    result = CliRunner().invoke(group, ["compare", *folders, *map(str, arguments)])
    assert result.exit_code == 0, result.output
    for written in (result.output, page.read_text(), text.read_text()):
        assert "attention.mode" in written and "vt/8192" in written
        assert OTHER_TOKENIZERS in written
    assert "| vt/4096 | 61.00 | 61.00 |" in text.read_text()
    html = page.read_text()
    for title in (
        "Training loss",
        "Loss by position",
        "vt, by length",
        "niah_single, by length",
        "Tokens/s",
        "Peak memory",
    ):
        assert f"<figcaption>{title}" in html
    assert "<script" not in html and "http" not in html.replace("http-equiv", "")
    values = json.loads(report.read_text())
    assert values["different_keys"]["attention.mode"] == {"a": "anchor", "b": "full"}
    assert values["warnings"] == [OTHER_TOKENIZERS]
    assert values["figures"]["vt/4096"] == {"a": 61.0, "b": 61.0}


def test_keys_are_shown_as_yaml_has_them(arm):
    lengths = {"lengths": [32, 64], "tasks": ["held_out", "niah_single"]}
    found = compare_runs([arm("a", evaluate=lengths), arm("b", data={"max_windows": 5})])
    assert found.difference_cells() == [
        ["data.max_windows", "null", "5"],
        ["evaluate.lengths", "[32, 64]", "null"],
        ["evaluate.tasks", "[held_out, niah_single]", "[held_out]"],
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, None),
        ({"path": "elsewhere", "workers": 3, "shuffle": False}, None),
        ({"tokenizer": "other", "path": "elsewhere"}, "tokenizers differ"),
        (
            {"max_windows": 5, "packing": {"method": "best_fit"}},
            "in data.max_windows, data.packing:",
        ),
    ],
)
def test_losses_that_are_not_of_the_same_tokens_are_named(arm, tmp_path, data, message):
    folders = [arm("a"), arm("b", data=data)]
    text = tmp_path / "c.md"
    result = CliRunner().invoke(group, ["compare", *map(str, folders), "--markdown", str(text)])
    assert result.exit_code == 0, result.output
    for written in (result.output, text.read_text()):
        if message is None:
            assert "note: " not in written.lower()
        else:
            assert message in written


def test_one_tokenizer_in_two_folders_is_no_other_one(arm, prepared, tmp_path):
    shutil.copytree(prepared / "tokenizer", tmp_path / "moved" / "tokenizer")
    moved = {"path": str(tmp_path / "moved"), "tokenizer": "other"}
    assert compare_runs([arm("a"), arm("b", data=moved)]).warnings == []
    with (tmp_path / "moved" / "tokenizer" / "tokenizer.json").open("a") as file:
        file.write(" ")
    assert compare_runs([tmp_path / "a", tmp_path / "b"]).warnings == [OTHER_TOKENIZERS]


def test_results_by_hand_belong_to_a_run_by_their_models_names(arm, tmp_path):
    folders = [arm("a"), arm("a-long", mode="full")]
    extra = tmp_path / "results.json"
    rows = [
        {"model": model, "task": "fwe", "length": 4096, "score": score}
        for model, score in (("a-step-000009", 10.0), ("a-long-hf", 20.0))
    ]
    extra.write_text(json.dumps({"harness": {"results": rows}}))
    found = compare_runs(folders, [extra])
    assert [each.scores["fwe/4096"] for each in found.arms] == [10.0, 20.0]
    rows[0]["model"] = "other"
    extra.write_text(json.dumps({"harness": {"results": rows}}))
    with pytest.raises(UserError, match=r"results of other.*none of the runs a, a-long"):
        compare_runs(folders, [extra])
    with pytest.raises(UserError, match="two runs or more"):
        compare_runs(folders[:1])
