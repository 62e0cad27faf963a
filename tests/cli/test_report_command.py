"""``anchorcontext report``: the table always, the page where it is asked for."""

import json

import pytest
from click.testing import CliRunner

from anchorcontext.cli.report import command


@pytest.fixture
def run(tmp_path):
    start = {"event": "start", "time": 1.79e9, "step": 0, "ranks": 1}
    step = {"step": 1, "loss": 2.5, "tokens": 100, "tokens_per_second": 50.0, "seconds": 2.0}
    step |= {"peak_memory_bytes": 2**30, "bytes_sent": 0, "attention_balance": 1.0}
    folder = tmp_path / "run"
    (folder / "profile").mkdir(parents=True)
    (folder / "profile" / "steps.json.gz").write_bytes(b"")
    lines = [json.dumps(start), json.dumps(step), '{"step": 2, "lo']
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def report(*arguments):
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def test_the_table_stays_and_no_page_is_written(run):
    result = report(run)
    assert result.exit_code == 0, result.output
    assert "2.5000 -> 2.5000" in result.output and "steps.json.gz" in result.output
    assert list(run.parent.rglob("*.html")) == []


def test_a_page_is_written_beside_the_table_and_the_json(run, tmp_path):
    result = report(run, "--html", tmp_path / "run.html", "--json", tmp_path / "run.json")
    assert result.exit_code == 0, result.output
    assert "tokens/s, median step" in result.output
    page = (tmp_path / "run.html").read_text()
    assert page.startswith("<!doctype html>") and page.count("<svg ") >= 4
    assert json.loads((tmp_path / "run.json").read_text())["steps"] == 1


def test_a_page_that_cannot_be_written_is_a_users_mistake(run):
    result = report(run, "--html", run / "metrics.jsonl" / "run.html")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --html = ") and "cannot be written" in result.stderr
