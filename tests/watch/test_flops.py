"""FLOPs of packed documents against counting the mask and against torch's own counter."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)
from transformers import LlamaConfig, LlamaForCausalLM

from anchorcontext.modes import MODES, PADDING, visible
from anchorcontext.watch.flops import (
    ModelShape,
    attention_flops,
    document_pairs,
    known_peak_flops,
    linear_flops,
    model_shape,
    training_flops,
    visible_pairs,
)

DOCUMENTS = {
    "one token": [1],
    "one document": [12],
    "anchor and three": [1, 7, 13, 5],
    "all of one token": [1] * 9,
    "no single-token anchor": [4, 3],
}


def tiny_llama(tied: bool = False) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS.keys())
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_pairs_equal_the_counted_mask(mode, lengths):
    doc_ids = np.repeat(np.arange(len(lengths)), lengths)
    for padding in (0, 3):
        padded = np.r_[doc_ids, np.full(padding, PADDING)]
        counted = int(visible(mode, padded).sum())
        assert visible_pairs(mode, padded) == counted


def test_pairs_of_interleaved_documents_equal_the_counted_mask():
    doc_ids = np.random.default_rng(0).integers(1, 5, size=60)
    doc_ids[0] = 0
    for mode in MODES.values():
        assert visible_pairs(mode, doc_ids) == int(visible(mode, doc_ids).sum())


def test_pairs_of_a_128k_window_do_not_overflow():
    assert document_pairs([131072]) == 131072 * 131073 // 2


@pytest.mark.parametrize("tied", [False, True])
def test_model_shape_counts_matrix_weights_with_the_head_and_without_the_embedding(tied):
    per_layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128
    assert model_shape(tiny_llama(tied)) == ModelShape(
        linear_weights=2 * per_layer + 64 * 128, num_layers=2, num_heads=4, head_dim=16
    )


def test_linear_flops_equal_torchs_counter():
    model, tokens = tiny_llama(), 24
    ids = torch.arange(tokens)[None]
    with FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False).logits.sum().backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(counts[op] for op in (torch.ops.aten.mm, torch.ops.aten.addmm) if op in counts)
    assert products == linear_flops(model_shape(model), tokens)


def test_attention_flops_of_a_full_square_equal_torchs_formula():
    shape = ModelShape(linear_weights=0, num_layers=3, num_heads=4, head_dim=16)
    size = (1, 4, 32, 16)
    one_layer = sdpa_flop_count(size, size, size) + sdpa_backward_flop_count(size, size, size, size)
    assert attention_flops(shape, pairs=32 * 32) == 3 * one_layer


def test_short_documents_cost_less_attention_and_the_same_linear_work():
    shape = model_shape(tiny_llama())
    one = training_flops(shape, tokens=64, pairs=document_pairs([64]))
    four = training_flops(shape, tokens=64, pairs=document_pairs([16] * 4))
    assert one - four == attention_flops(shape, 64 * 65 // 2 - 4 * 16 * 17 // 2)


def test_known_peaks():
    assert known_peak_flops("NVIDIA H200", torch.bfloat16) == 989e12
    assert known_peak_flops("NVIDIA H100 PCIe", torch.bfloat16) == 756e12
    assert known_peak_flops("NVIDIA A100-SXM4-80GB", torch.float16) == 312e12
    assert known_peak_flops("NVIDIA H200", torch.float32) is None
    assert known_peak_flops("Some New Card", torch.bfloat16) is None
