"""``anchorcontext inspect`` on windows with pieces, tags and copies of the anchor."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from anchorcontext.cli import group
from anchorcontext.data import WindowRecord, build_folder

CONFIG = """
model: {{scratch: {{model_type: llama, vocab_size: 128}}}}
data: {{path: {path}, window_tokens: 12, tokenizer: unused}}
train: {{steps: 4, windows_per_step: 2}}
"""
# Documents 0 and 1 in pieces, each behind a tag of two tokens; then both behind copies.
PIECES = WindowRecord(
    np.arange(14),
    np.array([0, 1, 5, 8, 11, 14]),
    np.array([-1, 0, 1, 0, 1]),
    np.array([0, 0, 0, 2, 1]),
    np.array([0, 2, 2, 0, 0]),
)
COPIES = WindowRecord(
    np.arange(7), np.array([0, 1, 4, 5, 7]), np.array([0, 0, 1, 1]), np.array([-1, 0, -1, 0])
)


@pytest.fixture
def inspect(tmp_path):
    with build_folder(tmp_path / "windows") as builder:
        builder.write_documents([(["web", "code"], ["a.txt", "b.py"], np.array([5, 4]))])
        builder.write_windows([PIECES, COPIES])
        builder.write_meta(
            {"anchor_id": 0, "vocab_size": 128, "window_tokens": 14, "num_documents": 2}
        )
    (tmp_path / "job.yaml").write_text(CONFIG.format(path=tmp_path / "windows"))

    def run(*arguments):
        options = [str(tmp_path / "job.yaml"), "--json", str(tmp_path / "found.json")]
        result = CliRunner().invoke(group, ["inspect", *options, *map(str, arguments)])
        assert result.exit_code == 0, result.output
        return result.output, json.loads((tmp_path / "found.json").read_text())

    return run


def test_pieces_are_named_by_their_document_and_tags_are_masked(inspect, tmp_path):
    output, found = inspect("--png", tmp_path / "w.png")
    rows = found["documents"]
    assert [row["document"] for row in rows] == [0, 1, 2, 1, 2]
    assert [row["name"] for row in rows] == [
        "anchor",
        "web/a.txt",
        "code/b.py",
        "web/a.txt [2..]",
        "code/b.py [1..]",
    ]
    assert [row["masked"] for row in rows] == [0, 2, 2, 0, 0]
    # The tag's second token is nobody's target; its last one predicts the document's first.
    assert [row["targets"] for row in rows] == [0, 2, 1, 2, 2]
    assert "masked" in output
    # Own document (1, 4 + 3, 3 + 3 tokens) and the anchor, seen by 13 others.
    assert found["visible_pairs"] == 1 + 7 * 8 // 2 + 6 * 7 // 2 + 13
    assert (tmp_path / "w.png").stat().st_size > 1000


def test_copies_of_the_anchor_are_named_and_have_position_zero(inspect):
    output, found = inspect("--window", 1, "--mode", "intra_doc")
    rows = found["documents"]
    assert [row["name"] for row in rows][::2] == ["copy of the anchor"] * 2
    positions = [(row["first_position"], row["last_position"]) for row in rows]
    assert positions == [(0, 0), (1, 3), (0, 0), (4, 5)]
    assert [row["targets"] for row in rows] == [0, 2, 0, 1]
    assert [row["document"] for row in rows] == [0, 0, 1, 1]
    assert "copy of the anchor" in output


def test_windows_without_either_have_no_such_column():
    result = CliRunner().invoke(group, ["inspect", "--documents", "3,4"])
    assert result.exit_code == 0 and "masked" not in result.output
