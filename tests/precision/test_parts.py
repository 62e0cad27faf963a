"""Stages of attention in chosen formats, and the split of a deviation into their parts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from anchorcontext.errors import UserError
from anchorcontext.precision import LayerAttention, Workers, attention_rows
from anchorcontext.precision.rope.parts import Parts, split
from anchorcontext.precision.rope.stages import (
    EXACT,
    STAGES,
    Heads,
    Stack,
    output_of,
    parse_stack,
    rotate,
    scores_of,
    weights_of,
)

TOKENS, DIM = 96, 32
LATER = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers(1) as pool:
        yield pool


def make_heads(seed: int = 0, num_heads: int = 4, key_heads: int = 2) -> Heads:
    generator = torch.Generator().manual_seed(seed)

    def normal(count: int) -> torch.Tensor:
        x = torch.randn(count, TOKENS, DIM, generator=generator)
        return x.bfloat16().double()

    inv_freq = 10_000.0 ** -(torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    return Heads(normal(num_heads), normal(key_heads), normal(key_heads), DIM**-0.5, inv_freq)


def test_fp64_everywhere_deviates_nowhere(workers: Workers) -> None:
    parts = split(make_heads(), parse_stack("all:fp64"), offset=1024, shift=16, workers=workers)
    assert parts.total[0].tolist() == [0.0, 0.0, 0.0]
    assert (parts.total[1] < 1e-11).all() and (parts.floor < 1e-11).all()
    assert (parts.alone == 0).all() and (parts.ordered == 0).all()


def test_exact_stages_are_attention() -> None:
    heads = make_heads()
    positions = torch.arange(TOKENS) + 7
    q, k = (rotate(x[0], positions, heads, EXACT) for x in (heads.query, heads.key))
    scores = scores_of(q, k, LATER, heads.scaling, EXACT)
    out = output_of(weights_of(scores, EXACT), heads.value[0], EXACT)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], heads.value[:1], is_causal=True, scale=heads.scaling
    )
    torch.testing.assert_close(out, wanted[0], atol=1e-13, rtol=0)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_rotation_of_a_stock_model_is_reproduced(dtype: str) -> None:
    heads, stack = make_heads(), parse_stack(f"sdpa:{dtype}")
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    positions = torch.arange(TOKENS) + 16_384
    # As transformers does: angles in fp32, tables cast, rotation in the model's dtype.
    angles = positions[:, None].float() * heads.inv_freq.float()
    angles = torch.cat((angles, angles), -1)
    cos, sin = angles.cos().to(torch_dtype), angles.sin().to(torch_dtype)
    q, k = (x.to(torch_dtype)[None] for x in (heads.query, heads.key))
    stock_q, stock_k = apply_rotary_pos_emb(q, k, cos[None], sin[None])
    for stock, own in ((stock_q, heads.query), (stock_k, heads.key)):
        for head, x in enumerate(own):
            ours = rotate(x, positions, heads, stack)
            # A table's cosine may be rounded twice by torch: rarely, and by one unit.
            assert (ours != stock[0, head].double()).float().mean() < (
                0.002 if dtype != "fp32" else 0.2
            )
            unit = torch.finfo(torch_dtype).eps
            torch.testing.assert_close(ours, stock[0, head].double(), atol=4 * unit, rtol=2 * unit)


@pytest.mark.parametrize(("kind", "scores"), [("eager", "model"), ("sdpa", "fp32")])
def test_scores_and_probabilities_of_a_stock_model_are_reproduced(kind: str, scores: str) -> None:
    heads, stack = make_heads(), parse_stack(f"{kind}:bf16")
    positions = torch.arange(TOKENS)
    q, k = (rotate(x[0], positions, heads, stack) for x in (heads.query, heads.key))
    ours = weights_of(scores_of(q, k, LATER, heads.scaling, stack), stack)
    seen = LayerAttention(*(x.bfloat16()[None] for x in (q, k, heads.value[0])), heads.scaling)
    _, wanted = attention_rows(seen, 0, 0, TOKENS, scores)  # type: ignore[arg-type]
    if kind == "eager":
        assert (ours != wanted.double()).float().mean() < 0.01
        torch.testing.assert_close(ours, wanted.double(), atol=0, rtol=0.02)
    else:
        torch.testing.assert_close(ours, wanted.double(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["all:bf16", "sdpa:bf16", "all:fp8_e4m3", "qk-fp32:bf16"])
def test_ordered_parts_sum_to_the_whole(name: str, workers: Workers) -> None:
    parts = split(make_heads(), parse_stack(name), offset=1024, shift=16, workers=workers)
    np.testing.assert_allclose(parts.ordered.sum(-1), parts.total, rtol=1e-6)
    silent = [i for i, stage in enumerate(STAGES) if parse_stack(name)[stage] == "fp64"]
    assert (parts.ordered[..., silent] == 0).all()


def test_stages_alone_explain_a_stock_model(workers: Workers) -> None:
    """bf16 tables and rotation make up its error, and their squares add up to it."""
    parts = split(make_heads(), parse_stack("sdpa:bf16"), offset=0, shift=16, workers=workers)
    for quantity in (0, 1):
        for kind in (0, 1):
            whole = parts.total[kind, quantity]
            named = parts.ordered[kind, quantity]
            tables, rotation = (named[STAGES.index(s)] for s in ("tables", "rotation"))
            assert 0.1 < tables / whole < 0.4 and 0.6 < rotation / whole < 0.9
            assert abs(tables + rotation - whole) < 0.01 * whole
            assert abs(parts.interaction[kind, quantity]) < 0.05 * whole
    # Operands are on the grid after a rotation in bf16: they add nothing, though alone they would.
    operands = STAGES.index("operands")
    assert parts.ordered[0, 0, operands] == 0 < parts.alone[0, 0, operands]


def test_only_the_output_sees_values(workers: Workers) -> None:
    parts = split(make_heads(), parse_stack("values:bf16"), offset=0, shift=16, workers=workers)
    assert (parts.total[:, :2] < 1e-11).all()
    assert parts.total[0, 2] > 1e-4


def test_positions_in_bf16_ruin_far_offsets(workers: Workers) -> None:
    near, far = (
        split(make_heads(), parse_stack("positions:bf16"), offset=o, shift=16, workers=workers)
        for o in (0, 16_384)
    )
    assert near.total[0, 0] == 0.0  # 96 positions are numbers of bf16
    assert far.total[0, 0] > 0.1


def test_heads_left_out_are_left_out(workers: Workers) -> None:
    heads, stack = make_heads(), parse_stack("sdpa:bf16")
    each = [
        split(heads, stack, offset=0, shift=16, workers=workers, only=[h]).total[:, 0]
        for h in range(4)
    ]
    whole = split(heads, stack, offset=0, shift=16, workers=workers)
    np.testing.assert_allclose(sum(each), whole.total[:, 0], rtol=1e-12)


def test_the_split_does_not_depend_on_workers_or_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(num_threads: int) -> Parts:
        with Workers(num_threads) as workers:
            stack = parse_stack("sdpa:bf16")
            return split(make_heads(), stack, offset=5, shift=16, workers=workers)

    one, two = once(1), once(2)
    assert (one.ordered == two.ordered).all()
    monkeypatch.setattr("anchorcontext.precision.rope.parts.BLOCK_ELEMENTS", 17 * TOKENS)
    np.testing.assert_allclose(once(1).ordered, one.ordered, rtol=1e-9, atol=1e-15)


def test_stacks_are_named() -> None:
    stack = parse_stack("tables-fp32:bf16")
    assert (stack["tables"], stack["rotation"], stack["operands"]) == ("fp32", "fp32", "bf16")
    assert parse_stack("quantised:fp8_e4m3")["rotation"] == "bf16"
    assert parse_stack("tables:bf16") == Stack.of("tables:bf16", "fp64", tables="bf16")
    for wrong in ("sdpa", "flash:bf16", "sdpa:int8"):
        with pytest.raises(UserError, match=r"sdpa|format"):
            parse_stack(wrong)
