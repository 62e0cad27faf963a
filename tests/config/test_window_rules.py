"""Rules of the keys that decide windows: packing, upsample, tags, interleave, anchor_copies."""

from pathlib import Path

import pytest

from anchorcontext.config import load_config
from anchorcontext.errors import UserError

CONFIG = """
run: {name: test}
model: {scratch: {model_type: llama}}
data: {path: windows, tokenizer: t, window_tokens: 64}
train: {steps: 1, windows_per_step: 1}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    return file


def test_true_is_a_section_of_the_papers_values_and_false_is_none(path: Path) -> None:
    data = load_config(path, ["data.upsample=true", "data.interleave=true"]).data
    assert data.upsample is not None and data.interleave is not None
    assert (data.upsample.below, data.upsample.keep) == (4096, 0.1)
    assert data.interleave.pieces == (2, 3) and data.interleave.cut == (0.2, 0.8)
    assert data.interleave.tokens == (64, 2048)
    assert load_config(path, ["data.upsample=false"]).data.upsample is None
    part = load_config(path, ["data.interleave.pieces=[2,2]"]).data.interleave
    assert part is not None and part.pieces == (2, 2) and part.tokens == (64, 2048)


@pytest.mark.parametrize(
    ("overrides", "key", "rule"),
    [
        (
            ["data.packing.max_truncation=0.1"],
            "data.packing.max_truncation = 0.1",
            "'concat' cuts wherever a window ends",
        ),
        (
            ["data.packing.method=whole_documents", "data.packing.max_truncation=0.1"],
            "data.packing.max_truncation = 0.1",
            "'whole_documents' cuts nothing",
        ),
        (["data.packing.method=best"], "data.packing.method = 'best'", "best_fit"),
        (["data.packing.min_fill=2"], "data.packing.min_fill = 2", "1"),
        (["data.upsample.keep=0"], "data.upsample.keep = 0", "0"),
        (["data.interleave.pieces=[3,2]"], "data.interleave.pieces", "set it to [2, 3]"),
        (["data.interleave.cut=[0.8,0.2]"], "data.interleave.cut", "set it to [0.2, 0.8]"),
        (["data.tags=domain"], "data.tags = 'domain'", "names the source as {source}"),
        (["data.tags='{name}: '"], "data.tags = '{name}: '", "names the source as {source}"),
        (["data.tags='{source'"], "data.tags = '{source'", "names the source as {source}"),
        (["data.anchor_copies=documents"], "data.anchor_copies", "shows one anchor to all"),
        (
            ["data.anchor_copies=segments", "data.anchor=none", "attention.mode=intra_doc"],
            "data.anchor_copies = 'segments'",
            "there is no anchor to copy",
        ),
        (
            [
                "data.interleave=true",
                "attention.backend=ring_flash_attn",
                "attention.mode=intra_doc",
                "parallel.sp=2",
            ],
            "data.interleave = true",
            "takes each as one run",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused(
    path: Path, overrides: list[str], key: str, rule: str
) -> None:
    with pytest.raises(UserError) as raised:
        load_config(path, overrides)
    assert key in str(raised.value) and rule in str(raised.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.packing.method=best_fit", "data.packing.max_truncation=0.1"],
        ["data.anchor_copies=documents", "attention.mode=intra_doc"],
        ["data.tags='<{source}>'", "data.interleave=true"],
    ],
)
def test_keys_that_go_together_are_accepted(path: Path, overrides: list[str]) -> None:
    load_config(path, overrides)
