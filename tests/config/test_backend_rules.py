"""attention.backend: the rules between keys refuse what the plan would refuse, and no more."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from anchorcontext import Window
from anchorcontext.config import load_config
from anchorcontext.errors import UserError
from anchorcontext.plan import RingFlashAttnPlan

VALID = """\
model: {path: some/model}
data: {path: windows, window_tokens: 64}
attention: {backend: ring_flash_attn, mode: full}
parallel: {sp: 2}
train: {steps: 4, windows_per_step: 8}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(VALID)
    return path


def config_serves(path: Path, *overrides: str) -> bool:
    try:
        load_config(path, overrides)
    except UserError:
        return False
    return True


def algorithm_of(mode: str, layout: str, exchange: str):
    window = Window.from_documents([range(8), range(24)], 0 if mode == "anchor" else None, mode)
    try:
        return RingFlashAttnPlan([window], 2, layout, exchange).algorithm
    except UserError:
        return None


@pytest.mark.parametrize("mode", ["full", "intra_doc", "intra_doc_reset", "anchor"])
def test_the_config_refuses_what_the_plan_refuses(path, mode):
    layouts = ("auto", "contiguous", "zigzag", "balanced")
    exchanges = ("auto", "ring", "gather", "ulysses", "hybrid")
    for layout, exchange in product(layouts, exchanges):
        algorithm = algorithm_of(mode, layout, exchange)
        keys = [
            f"attention.{k}={v}"
            for k, v in zip(("mode", "layout", "exchange"), (mode, layout, exchange), strict=True)
        ]
        ulysses = ["attention.ulysses=2"] if exchange == "hybrid" else []
        for dtype, name in (("bf16", "bfloat16"), ("fp32", "float32")):
            served = algorithm is not None and name in algorithm.dtypes
            found = config_serves(path, *keys, *ulysses, f"model.dtype={dtype}")
            assert found == served, (layout, exchange, dtype)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("parallel.sp=1", "parallel.sp = 1: is 2 or more with attention.backend"),
        ("attention.mode=anchor", "attention.mode = 'anchor': needs a key that all documents see"),
        ("attention.engine=cpu", "attention.engine = 'cpu': is 'auto' with attention.backend"),
        ("attention.exact=true", "attention.exact = true: is false with attention.backend"),
        ("attention.ulysses=2", "attention.ulysses = 2: is 1 with attention.backend"),
        ("attention.layout=balanced", "layout zigzag with exchange ring"),
        ("model.dtype=fp32", "model.dtype = 'fp32': gets wrong gradients from the rings"),
    ],
)
def test_what_the_package_cannot_express_is_a_broken_rule(path, override, message):
    with pytest.raises(UserError) as caught:
        load_config(path, [override])
    assert message in str(caught.value)
    assert "set attention.backend to native" in str(caught.value)
