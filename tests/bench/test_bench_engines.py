"""``bench kernels`` and ``bench numerics`` write their sections; wrong options are named."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from anchorcontext.cli.bench.engines import kernels, numerics


@pytest.mark.parametrize(
    ("command", "options", "heading"),
    [
        (
            kernels,
            ["--heads", "2/1", "--head-dim", "8", "--repeats", "1", "--mix", "documents_of_64"],
            "## Engines",
        ),
        (numerics, ["--head-dim", "8"], "## Errors against fp64"),
    ],
)
def test_writes_its_section(tmp_path, command, options, heading):
    page = tmp_path / "page.md"
    page.write_text("# A page\n\nkept\n")
    arguments = ["--tokens", "100", *options, "--markdown", str(page)]
    for _ in range(2):
        result = CliRunner().invoke(command, arguments)
        assert result.exit_code == 0, result.output
    text = page.read_text()
    assert text.startswith("# A page\n\nkept\n")
    assert text.count(heading) == 1 and f"--markdown {page}" in text


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        (kernels, ["--heads", "3/2"], "key/value heads must divide"),
        (numerics, ["--head-dim", "0"], "at least one dimension"),
        (kernels, ["--mix", "slimpyjama"], "slimpajama"),
    ],
)
def test_names_what_is_wrong(command, options, message):
    result = CliRunner().invoke(command, options)
    assert result.exit_code == 2
    assert message in result.output
