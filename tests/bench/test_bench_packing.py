"""bench packing: every way on the same lengths, the plain loop agrees with concat."""

import json

from click.testing import CliRunner

from anchorcontext.bench import packing
from anchorcontext.cli import group


def test_the_command_measures_every_way_and_writes_its_section(tmp_path):
    page, found = tmp_path / "page.md", tmp_path / "found.json"
    arguments = ["--documents", "2000", "--window", "512", "--markdown", str(page)]
    done = CliRunner().invoke(group, ["bench", "packing", *arguments, "--json", str(found)])
    assert done.exit_code == 0, done.output
    results = json.loads(found.read_text())
    ways = {result["way"]: result for result in results}
    assert list(ways) == list(packing.WAYS)
    for name in ("windows", "utilisation", "cut", "tokens"):
        assert ways[packing.PLAIN_LOOP][name] == ways["concat"][name]
    assert ways["best_fit"]["cut"] < ways["concat"]["cut"]
    assert "2,000 documents" in page.read_text() and "best_fit" in page.read_text()
