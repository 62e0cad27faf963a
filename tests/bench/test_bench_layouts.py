"""``anchorcontext bench layouts`` writes its section of the page and leaves the others alone."""

from __future__ import annotations

import json

from click.testing import CliRunner

from anchorcontext.bench import layouts
from anchorcontext.cli import group


def test_the_command_writes_its_section_and_json(tmp_path, monkeypatch):
    monkeypatch.setattr(layouts, "MIXES", {"tiny": ("short", 8192)})
    monkeypatch.setattr(layouts, "SP_SIZES", (2, 4))
    page, report = tmp_path / "page.md", tmp_path / "report.json"
    page.write_text("# Benchmarks\n\n<!-- begin other -->\nkept\n<!-- end other -->\n")
    arguments = ["bench", "layouts", "--markdown", str(page), "--json", str(report)]
    result = CliRunner().invoke(group, arguments)
    assert result.exit_code == 0, result.output
    assert "balanced" in result.output
    found = json.loads(report.read_text())
    assert len(found) == 2 * 2 * len(layouts.LAYOUTS)
    assert all(row["over_bound"] > 0.999999 and row["balance"] >= 1 for row in found)
    text = page.read_text()
    assert "kept" in text and "<!-- begin layouts -->" in text
    assert text.count("| tiny (") == 5 * 2
