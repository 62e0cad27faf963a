"""A run's table from what it left on disk."""

from __future__ import annotations

import json

import pytest

from anchorcontext.errors import UserError
from anchorcontext.watch.summary import summarize


def write(path, lines):
    path.mkdir(parents=True, exist_ok=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def record(step, loss, **changes):
    return {
        "step": step,
        "loss": loss,
        "tokens": 100,
        "tokens_per_second": 50.0 * step,
        "peak_memory_bytes": 1000 + step,
        "bytes_sent": 7,
        "attention_balance": 1.0 + step / 10,
        "skipped": loss is None,
        **changes,
    }


def parity(difference, passed=True):
    return {"event": "parity", "passed": passed, "largest_logit_difference": difference}


def test_a_resumed_run_counts_every_step_once_and_every_start(tmp_path):
    start = {"event": "start", "step": 0}
    lines = [start, parity(1e-7), record(1, 9.0), record(2, 8.0), start, record(2, 7.5)]
    write(tmp_path, [*lines, record(3, None), record(4, 6.0), parity(3e-6), parity(0.0)])
    for name in ("step-000002.old.tmp", "step-000004", "step-000008.tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    found = summarize(tmp_path)
    assert (found.steps, found.skipped, found.starts) == (4, 1, 2)
    assert (found.first_loss, found.last_loss) == (9.0, 6.0)
    assert found.tokens == 400 and found.bytes_sent == 28
    assert found.median_tokens_per_second == 125.0
    assert found.peak_memory_bytes == 1004
    assert found.attention_balance == pytest.approx(1.25)
    assert (found.parity_checks, found.parity_failures) == (3, 0)
    assert found.largest_logit_difference == 3e-6
    assert [path.name for path in found.checkpoints] == ["step-000004"]


def test_a_failed_parity_check_is_counted(tmp_path):
    write(tmp_path, [parity(0.5, passed=False)])
    assert summarize(tmp_path).parity_failures == 1


def test_a_run_that_only_started_has_nothing_to_say_yet(tmp_path):
    write(tmp_path, [{"event": "start", "step": 0}])
    found = summarize(tmp_path)
    assert found.steps == 0 and found.first_loss is None
    assert found.largest_logit_difference is None


def test_a_folder_without_metrics_is_named(tmp_path):
    with pytest.raises(UserError, match=r"holds no metrics\.jsonl: give the folder of a run"):
        summarize(tmp_path)
