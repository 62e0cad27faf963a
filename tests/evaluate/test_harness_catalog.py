"""Names, presets and lengths of the evaluation; the paper's numbers stay the paper's."""

import importlib.util
import subprocess
import sys

import pytest

from anchorcontext.errors import UserError
from anchorcontext.evaluate.harness import catalog
from anchorcontext.evaluate.harness.require import require_harness
from anchorcontext.evaluate.lengths import length_label, parse_lengths


def test_presets_are_the_papers_sets():
    assert len(catalog.PRESETS["ruler-13"]) == 13
    left_out = set(catalog.PRESETS["ruler-13"]) - set(catalog.PRESETS["ruler-11"])
    assert left_out == {"niah_multikey_3", "ruler_cwe"}


def test_presets_aliases_and_names_expand_in_order_each_once():
    assert catalog.expand_tasks("vt,ruler_vt, hellaswag,loss-by-position") == [
        "ruler_vt",
        "hellaswag",
        "loss-by-position",
    ]
    assert catalog.expand_tasks("niah_multikey_3,ruler-11")[0] == "niah_multikey_3"


@pytest.mark.parametrize(
    ("asked", "message"),
    [("niah_single_4", "niah_single_3"), ("ruler-12", "ruler-1"), ("", "at least one")],
)
def test_an_unknown_task_is_refused_with_the_nearest_names(asked, message):
    with pytest.raises(UserError, match=message):
        catalog.expand_tasks(asked)


def test_both_meanings_of_4k_are_available_and_labelled():
    lengths = parse_lengths("4096,4000,128K,4k")
    assert lengths == [4000, 4096, 131072]
    assert [length_label(n) for n in lengths] == ["4,000", "4K", "128K"]


@pytest.mark.parametrize("asked", ["4.5K", "-1", "", "100", "4M"])
def test_a_length_that_is_none_is_refused(asked):
    with pytest.raises(UserError, match="--lengths"):
        parse_lengths(asked)


def test_published_rows_are_found_by_length():
    assert catalog.published_score("anchor", 131072) == 66.15
    assert catalog.published_score("full attention", 4000) == 88.85
    assert catalog.published_score("full attention", 1024) is None


def test_a_missing_extra_is_named(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "lm_eval" else find_spec(name)
    )
    with pytest.raises(UserError, match=r"anchorcontext\[eval\]"):
        require_harness()


def test_the_command_line_starts_without_the_harness():
    code = (
        "import sys; sys.modules['lm_eval'] = None\n"
        "from anchorcontext.cli import main; main(['evaluate', '--help'])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "ruler-11" in shown.stdout
