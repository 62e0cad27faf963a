"""``anchorcontext inspect`` on prepared data and without data."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from anchorcontext.cli import group
from anchorcontext.data import WindowRecord, build_folder

CONFIG = """
model:
  dtype: fp32
  scratch: {{model_type: llama, hidden_size: 64, num_attention_heads: 4, num_key_value_heads: 2,
            num_hidden_layers: 2, intermediate_size: 128, vocab_size: 128}}
data: {{path: {path}, window_tokens: 12, tokenizer: unused}}
attention: {{layout: contiguous}}
parallel: {{sp: 2}}
train: {{steps: 4, windows_per_step: 2}}
"""


def inspect(*arguments):
    return CliRunner().invoke(group, ["inspect", *map(str, arguments)])


@pytest.fixture
def config_path(tmp_path):
    with build_folder(tmp_path / "windows") as builder:
        builder.write_documents([(["web", "code"], ["a.txt", "b.py"], np.array([4, 14]))])
        builder.write_windows(
            WindowRecord(
                np.arange(12),
                np.array([0, 1, 5, 12]),
                np.array([-1, 0, 1]),
                np.array([0, 0, start]),
            )
            for start in (0, 7)
        )
        builder.write_meta(
            {"anchor_id": 0, "vocab_size": 128, "window_tokens": 12, "num_documents": 2}
        )
    path = tmp_path / "job.yaml"
    path.write_text(CONFIG.format(path=tmp_path / "windows"))
    return path


def test_a_prepared_window_with_its_documents_ranks_and_bytes(config_path, tmp_path):
    result = inspect(config_path, "--window", 1, "--json", tmp_path / "w.json")
    assert result.exit_code == 0, result.output
    assert "web/a.txt" in result.output and "code/b.py [7..]" in result.output
    report = json.loads((tmp_path / "w.json").read_text())
    assert [row["length"] for row in report["documents"]] == [1, 4, 7]
    assert report["sp"] == 2 and report["layout"] == "contiguous"
    # Token 5 of rank 0 is a key of rank 1's queries, and the anchor: 2 rows forward.
    rows, row_bytes = 2, 2 * 2 * 16 * 4
    assert report["ranks"][0]["rows_sent"] == rows
    assert report["ranks"][0]["bytes_sent"] == 2 * (2 + 1) * rows * row_bytes
    assert report["ranks"][1]["bytes_sent"] == 2 * rows * row_bytes


def test_overrides_and_options_change_the_view(config_path, tmp_path):
    arguments = ("attention.mode=full", "--sp", 3, "--layout", "zigzag", "--json")
    assert inspect(config_path, *arguments, tmp_path / "w.json").exit_code == 0
    report = json.loads((tmp_path / "w.json").read_text())
    assert (report["mode"], report["sp"], report["layout"]) == ("full", 3, "zigzag")
    assert report["visible_pairs"] == 12 * 13 // 2


def test_the_plan_is_drawn_with_the_configs_teams_of_ulysses(config_path, tmp_path):
    def found(*arguments):
        result = inspect(config_path, *arguments, "--json", tmp_path / "w.json")
        assert result.exit_code == 0, result.output
        return json.loads((tmp_path / "w.json").read_text())

    hybrid = found("attention.exchange=hybrid", "attention.ulysses=2", "parallel.sp=4")
    assert hybrid["exchange"] == "ulysses 2 + ring"
    # Two teams of 6 tokens: the members of a team share its work, a head each.
    assert [row["tokens"] for row in hybrid["ranks"]] == [3, 3, 3, 3]
    pairs = [row["pairs"] for row in hybrid["ranks"]]
    assert pairs[0] == pairs[1] and pairs[2] == pairs[3] and sum(pairs) == hybrid["visible_pairs"]
    example = ("--documents", "7,13,5", "--sp", 4, "attention.ulysses=2")
    assert "exchange ulysses 2 + " in inspect(*example).output


def test_an_exact_plan_has_no_ring(config_path):
    result = inspect(config_path, "attention.exact=true", "--exchange", "ring")
    assert result.exit_code == 2 and "exchange 'ring' with exact" in result.output


def test_heads_that_the_ranks_cannot_share_are_refused(config_path):
    result = inspect(config_path, "--sp", 3, "--exchange", "ulysses")
    assert result.exit_code == 2 and "ulysses = 3 with 4 query and 2 key/value" in result.output


def test_a_window_that_is_not_there(config_path):
    result = inspect(config_path, "--window", 2)
    assert result.exit_code == 2
    assert "--window 2" in result.output and "windows 0 to 1" in result.output


def test_without_data(tmp_path):
    png = tmp_path / "w.png"
    result = inspect("--documents", "7,13,5", "--sp", 4, "--layout", "zigzag", "--png", png)
    assert result.exit_code == 0, result.output
    assert "160 visible pairs" in result.output
    assert png.read_bytes().startswith(b"\x89PNG")


def test_controls_are_drawn_without_data(tmp_path):
    def found(*overrides):
        result = inspect("--documents", "3,2", *overrides, "--json", tmp_path / "w.json")
        assert result.exit_code == 0, result.output
        return json.loads((tmp_path / "w.json").read_text())

    own = 1 + 3 * 4 // 2 + 2 * 3 // 2  # the anchor itself, and each document inside itself
    assert found()["visible_pairs"] == own + 5
    assert found("attention.anchor.visible=false")["visible_pairs"] == own
    rows = found("attention.anchor.position=9", "positions.offset=4")["documents"]
    positions = [(row["first_position"], row["last_position"]) for row in rows]
    assert positions == [(9, 9), (5, 7), (8, 9)]
    rows = found("attention.anchor.copies=true")["documents"]
    assert [row["name"] for row in rows] == ["copy of the anchor", "", "copy of the anchor", ""]
    assert found("attention.mode=full", "--mode", "intra_doc")["mode"] == "intra_doc"
    assert found("attention.layout=contiguous", "--sp", "2")["layout"] == "contiguous"


def test_precision_of_an_example_is_shown_when_it_is_varied():
    varied = inspect("--documents", "3,2", "attention.precision.qk=fp32").output
    assert "qk fp32" in varied and "computes in" not in inspect("--documents", "3,2").output


def test_a_long_list_of_documents_is_cut_and_counted():
    lengths = ",".join(["3"] * 60)
    short, whole = inspect("--documents", lengths), inspect("--documents", lengths, "--all")
    assert "... and 21 more; --all lists them" in short.output
    assert "more;" not in whole.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--documents", "7,x"], "'7,x'"),
        (["--documents", "0"], "at least one token"),
        (["--documents", "7", "--mode", "ancho"], "did you mean 'anchor'?"),
        (["--documents", "7", "--layout", "zigzg"], "did you mean 'zigzag'?"),
        (["--documents", "7", "--sp", "0"], "at least one rank"),
        ([], "no window given"),
        (["attention.mode=full"], "override 'attention.mode=full', but no window given"),
        (["--documents", "7", "train.steps=3"], "override 'train.steps=3' beside --documents"),
        (["--documents", "7", "attention.anchor.token=eos"], "no tokens to replace"),
        (["--documents", "7", "attention.anchor={token: eos}"], "no tokens to replace"),
        (["--documents", "7", "attention.anchor.visibel=false"], "did you mean attention.anchor.v"),
        (
            ["--documents", "7", "--mode", "full", "attention.anchor.visible=false"],
            "has no meaning",
        ),
        (["--documents", "7", "job.yaml"], "both CONFIG job.yaml and --documents 7"),
    ],
)
def test_mistakes_are_named(arguments, message):
    result = inspect(*arguments)
    assert result.exit_code == 2
    assert message in result.output
