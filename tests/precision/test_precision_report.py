"""diagnose report: one page of what was measured; readings of shifts follow the numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from anchorcontext.cli.diagnose import command
from anchorcontext.precision import Deviation, Setting
from anchorcontext.precision.sheet import Sheet, Table, read_sheets, save_sheet
from anchorcontext.precision.shift.settings import ShiftSettings
from anchorcontext.precision.shift.sheet import shift_readings, shift_sheet
from anchorcontext.precision.shift.summary import Curve, ShiftSummary


def deviation(
    total: float, share: float, *, mass: float = 0.4, error: float = 1.0, tokens: int = 100
) -> Deviation:
    """One layer, one head, the first column holding ``share`` of D."""
    columns = np.full(tokens, total * (1 - share) / (tokens - 1))
    columns[0] = total * share
    logits = np.ones(tokens)
    logits[0] = error
    masses = np.full(tokens, (1 - mass) / (tokens - 1))
    masses[0] = mass
    return Deviation(
        heads=np.full((3, 2, 1, 1), total),
        first=np.full((3, 2, 1, 1), total * share),
        columns=np.stack([columns] * 3),
        logits=np.stack([logits] * 3),
        layer_columns=np.zeros((2, 3, 1, 1)),
        mass=masses,
        layer_mass=masses[:1, None],
    )


def summary(**by_setting: dict[int, Deviation]) -> ShiftSummary:
    curves = [
        Curve(Setting.parse(name), "length", {at: [d] for at, d in of.items()})
        for name, of in by_setting.items()
    ]
    settings = ShiftSettings("m", tuple(c.setting for c in curves), (0,), (64, 1024))
    return ShiftSummary(settings, curves, {"length": ["prose"]}, ["here"])


def readings(**by_setting: dict[int, Deviation]) -> str:
    return " ".join(shift_readings(summary(**by_setting)))


def test_shift_readings_flip_with_the_numbers() -> None:
    exact = {64: deviation(0.001, 0.1), 1024: deviation(0.001, 0.1)}
    one = readings(bf16={64: deviation(1.0, 0.3), 1024: deviation(4.0, 0.1)}, fp32=exact)
    assert "D is 4e+03 times that of fp32, so the dtype does it" in one
    assert "D grows 4 times, the length 16 times" in one
    assert "that share falls to 0.33 of it" in one
    assert "its probability is over 3 equal shares." in one and "logit error is large" not in one
    same = {
        64: deviation(0.001, 0.1, error=2.0),
        1024: deviation(0.001, 0.4, mass=0.001, error=2.0),
    }
    other = readings(bf16=same, fp32=exact)
    assert "so it is not the dtype" in other and "D stays within a factor" in other
    assert "that share grows 4 times" in other
    assert "its logit error is large." in other and "over 3 equal shares and" not in other
    assert "less than 3 equal shares" in readings(bf16={64: deviation(1.0, 0.001)})


def test_dependence_on_the_shift() -> None:
    def reading(far: float) -> str:
        of = {0: [deviation(1.0, 0.1)], 16: [deviation(0.0, 0.0)], 100: [deviation(far, 0.1)]}
        curve = Curve(Setting.parse("bf16"), "shift", of)
        settings = ShiftSettings("m", (curve.setting,), (0, 16, 100), (64,))
        return " ".join(shift_readings(ShiftSummary(settings, [curve], {"shift": ["code"]}, [])))

    assert "hardly depends on the shift" in reading(1.2)
    assert "depends on the shift: 1 at 0 to 3 at 100" in reading(3.0)


def test_the_page_holds_everything_and_loads_nothing(tmp_path: Path) -> None:
    picture = '<?xml version="1.0"?>\n<svg width="9pt" viewBox="0 0 9 9"><path d="M0 0"/></svg>'
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "rope-parts.svg").write_text(picture)
    save_sheet(
        Sheet(
            "rope",
            "Where & how",
            "anchorcontext diagnose rope m",
            ["a CPU, torch 2"],
            {"tokens": 512, "stacks": ["sdpa:bf16"]},
            ["tables < rotation"],
            [Table("Of <all>", ["stack", "D"], [["sdpa:bf16", 0.125]])],
            {"rope-parts": "rope parts", "rope-gone": "not drawn"},
        ),
        tmp_path,
    )
    of = {64: deviation(1.0, 0.3), 1024: deviation(4.0, 0.1)}
    save_sheet(shift_sheet(summary(bf16=of), command="anchorcontext diagnose shift m"), tmp_path)
    ran = CliRunner().invoke(command, ["report", str(tmp_path)])
    assert ran.exit_code == 0 and "shift, rope: written" in ran.output
    page = (tmp_path / "report.html").read_text()
    for part in (
        "tables &lt; rotation",
        "Where &amp; how",
        "Of &lt;all&gt;",
        "<td>0.125</td>",
        "sdpa:bf16",
        '<path d="M0 0"/>',
        "D grows 4 times",
        "tokens: 512",
    ):
        assert part in page, part
    assert page.index("Shift invariance") < page.index("Where &amp; how")
    assert "<script" not in page and "src=" not in page and "<?xml" not in page
    assert [sheet.name for sheet in read_sheets(tmp_path)] == ["rope", "shift"]


def test_a_damaged_sheet_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    of = {64: deviation(1.0, 0.3)}
    save_sheet(shift_sheet(summary(bf16=of), command="anchorcontext diagnose shift m"), tmp_path)
    (tmp_path / "rope.sheet.json").write_text("{")
    (tmp_path / "gradients.sheet.json").write_text('{"name": "gradients"}')
    assert [sheet.name for sheet in read_sheets(tmp_path)] == ["shift"]
    assert "diagnose rope ... --stored" in caplog.text


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    ran = CliRunner().invoke(command, ["report", str(tmp_path)])
    assert ran.exit_code == 2 and "no results there" in ran.output
