"""The result files of ``anchorcontext evaluate`` over several calls."""

import json
from types import SimpleNamespace

from anchorcontext.cli.evaluate.results import Part, write_results


def test_a_kind_of_task_that_was_not_asked_for_keeps_its_scores(tmp_path):
    def write(digest, **parts):
        targets = [SimpleNamespace(name="m", digest=lambda: digest)]
        parts = {kind: Part(None, "", kept, f"table {kept}") for kind, kept in parts.items()}
        write_results(parts, targets, tmp_path)
        values = json.loads((tmp_path / "results.json").read_text())
        return {kind: values.get(kind) for kind in ("harness", "other")}

    assert write("a", harness=1) == {"harness": 1, "other": None}
    assert write("a", other=2) == {"harness": 1, "other": 2}
    assert write("a", harness=3) == {"harness": 3, "other": 2}
    assert write("a", harness=None) == {"harness": 3, "other": 2}  # all was skipped
    text = (tmp_path / "results.md").read_text()
    assert "table 3" in text and "table 2" in text and "table 1" not in text
    assert write("b", harness=4) == {"harness": 4, "other": None}  # of other weights
    assert "table 2" not in (tmp_path / "results.md").read_text()
