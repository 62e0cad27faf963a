"""Rules of the controls: what contradicts a mode, and what would change nothing, is refused."""

from pathlib import Path

import pytest

from anchorcontext.config import load_config
from anchorcontext.errors import UserError

CONFIG = """
run: {name: test}
model: {dtype: bf16, scratch: {model_type: llama}}
data: {path: windows, tokenizer: t, window_tokens: 64}
train: {steps: 1, windows_per_step: 1}
"""
FULL, INTRA, RESET = (f"attention.mode={name}" for name in ("full", "intra_doc", "intra_doc_reset"))
COPIED = ("data.anchor_copies=documents", INTRA)
HIDDEN = "attention.anchor.visible=false"
FP32_QK = "attention.precision.qk=fp32"
ENGINE = "attention.precision.rotation=engine"
NO_ANCHOR = "which has no anchor for all documents"
NO_EFFECT = "has no effect"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    return file


@pytest.mark.parametrize(
    ("overrides", "key", "rule"),
    [
        ((FULL, HIDDEN), "attention.anchor.visible = false", NO_ANCHOR),
        ((FULL, "attention.anchor.position=3"), "attention.anchor.position = 3", NO_ANCHOR),
        ((INTRA, "attention.anchor.position=3"), "attention.anchor.position = 3", "no copies"),
        (
            (INTRA, "attention.anchor.reset_positions=true"),
            "attention.anchor.reset_positions = true",
            "choose intra_doc_reset",
        ),
        (
            (INTRA, "attention.anchor.copies=true"),
            "attention.anchor.copies = true",
            "prepare them with data.anchor_copies",
        ),
        ((HIDDEN, "attention.anchor.position=3"), "attention.anchor.position = 3", NO_EFFECT),
        ((HIDDEN, "attention.anchor.copies=true"), "attention.anchor.copies = true", NO_EFFECT),
        ((HIDDEN, "attention.anchor.token=3"), "attention.anchor.token = 3", NO_EFFECT),
        ((INTRA, "attention.anchor.token=eos"), "attention.anchor.token = 'eos'", NO_EFFECT),
        (
            (FULL, "data.anchor=none", "attention.anchor.token=eos"),
            "attention.anchor.token = 'eos'",
            "there is no anchor to replace",
        ),
        (("attention.anchor.token=pad",), "attention.anchor.token = 'pad'", "must be"),
        (("attention.anchor.position=-1",), "attention.anchor.position = -1", "0"),
        (
            ("attention.anchor.copies=true", "loss.boundary=train"),
            "attention.anchor.copies = true",
            "would predict a copy",
        ),
        (
            ("attention.anchor.copies=true", "data.anchor_copies=documents"),
            "data.anchor_copies = 'documents'",
            "shows one anchor to all documents",
        ),
        ((RESET, "positions.clamp_first=true"), "positions.clamp_first = true", NO_EFFECT),
        (
            ("model.max_position_embeddings=64", "positions.offset=8"),
            "model.max_position_embeddings = 64",
            "data.window_tokens = 64 + positions.offset = 8; set it to 72",
        ),
        (
            ("model.max_position_embeddings=64", "attention.anchor.position=99"),
            "model.max_position_embeddings = 64",
            "attention.anchor.position = 99 lies beyond it; set it to 100",
        ),
        (
            ("attention.precision.rope_tables=fp32",),
            "attention.precision.rope_tables = 'fp32'",
            "set rotation to fp32 or engine, too",
        ),
        (
            ("attention.precision.softmax=model",),
            "attention.precision.softmax = 'model'",
            "one of fp32",
        ),
        (("model.dtype=fp32", FP32_QK), "attention.precision.qk = 'fp32'", NO_EFFECT),
        ((FP32_QK, "attention.engine=flash_attn"), "attention.engine = 'flash_attn'", "bf16"),
        (
            (FP32_QK, FULL, "attention.backend=ring_flash_attn", "parallel.sp=2"),
            "attention.backend = 'ring_flash_attn'",
            "which takes bf16 and fp16",
        ),
        (
            ("model.dtype=fp32", ENGINE),
            "attention.precision.rotation = 'engine'",
            NO_EFFECT,
        ),
        ((ENGINE, FP32_QK), "attention.precision.qk = 'fp32'", "or set rotation to fp32"),
        ((ENGINE, "attention.engine=varlen"), "attention.engine = 'varlen'", "rotation to model"),
        (
            (ENGINE, FULL, "attention.backend=ring_flash_attn", "parallel.sp=2"),
            "attention.backend = 'ring_flash_attn'",
            "attention.precision.rotation = 'engine' needs products of fp32",
        ),
    ],
)
def test_a_control_without_meaning_or_effect_is_refused(
    path: Path, overrides: tuple[str, ...], key: str, rule: str
) -> None:
    with pytest.raises(UserError) as raised:
        load_config(path, overrides)
    assert key in str(raised.value) and rule in str(raised.value)


@pytest.mark.parametrize(
    "overrides",
    [
        (HIDDEN, "attention.anchor.reset_positions=true"),
        (HIDDEN, "attention.backend=ring_flash_attn", "parallel.sp=2"),
        ("attention.anchor.position=7", "attention.anchor.token=eos", "positions.clamp_first=true"),
        (FULL, "attention.anchor.token=5", "positions.clamp_first=true", "positions.offset=9"),
        ("attention.anchor.copies=true", "attention.anchor.position=3"),
        (*COPIED, "attention.anchor.position=3", "attention.anchor.token=eos"),
        (RESET, "positions.clamp_first=true", "positions.offset=9"),
        ("attention.precision={rotation: fp32}",),
        (ENGINE, "attention.precision.rope_tables=fp32", "attention.engine=triton"),
        ("attention.precision={rotation: fp32, rope_tables: fp32, qk: fp32, softmax: fp32}",),
    ],
)
def test_controls_that_go_together_are_accepted(path: Path, overrides: tuple[str, ...]) -> None:
    load_config(path, overrides)


def test_the_model_must_reach_the_longest_position(path: Path) -> None:
    for overrides, positions in (
        ((), 64),
        (("positions.offset=8",), 72),
        (("attention.anchor.position=99",), 100),
        (("attention.anchor.position=9",), 64),
    ):
        assert load_config(path, overrides).longest_position == positions
