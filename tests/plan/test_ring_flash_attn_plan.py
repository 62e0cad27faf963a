"""The plan for ring-flash-attn: which function serves, how tokens lie, and what is refused."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from anchorcontext import Window
from anchorcontext.errors import UserError
from anchorcontext.plan import BatchPlan, RingFlashAttnPlan, plan_batch


def window_of(*lengths, mode="intra_doc"):
    return Window.from_documents(
        [range(n) for n in lengths], 0 if mode == "anchor" else None, mode=mode
    )


SERVED = {
    # mode, layout, exchange -> function; what is not here is refused
    ("full", "auto", "auto"): "zigzag_ring",
    ("full", "auto", "ring"): "zigzag_ring",
    ("full", "auto", "gather"): "llama3_varlen",
    ("full", "zigzag", "auto"): "zigzag_ring",
    ("full", "zigzag", "ring"): "zigzag_ring",
    ("full", "contiguous", "auto"): "llama3_varlen",
    ("full", "contiguous", "gather"): "llama3_varlen",
    ("full", "contiguous", "ring"): "ring",
    ("intra_doc", "auto", "auto"): "llama3_varlen",
    ("intra_doc", "auto", "gather"): "llama3_varlen",
    ("intra_doc", "auto", "ring"): "zigzag_ring_varlen",
    ("intra_doc", "zigzag", "auto"): "zigzag_ring_varlen",
    ("intra_doc", "zigzag", "ring"): "zigzag_ring_varlen",
    ("intra_doc", "contiguous", "auto"): "llama3_varlen",
    ("intra_doc", "contiguous", "gather"): "llama3_varlen",
}


@pytest.mark.parametrize("mode", ["full", "intra_doc"])
def test_layout_and_exchange_choose_the_function(mode):
    layouts, exchanges = ("auto", "zigzag", "contiguous"), ("auto", "ring", "gather")
    for layout, exchange in product(layouts, exchanges):
        try:
            plan = RingFlashAttnPlan([window_of(8, 16, mode=mode)], 2, layout, exchange)
            function = plan.algorithm.name
        except UserError as error:
            assert "choose one of them" in str(error)
            function = None
        assert function == SERVED.get((mode, layout, exchange)), (layout, exchange)


def test_zigzag_in_intra_doc_gives_every_rank_two_chunks_of_every_document():
    plan = RingFlashAttnPlan([window_of(8, 16)], 2, "zigzag")
    first, second = (plan.local_indices(rank, 0).tolist() for rank in range(2))
    assert first == [0, 1, 6, 7, *range(8, 12), *range(20, 24)]
    assert second == [2, 3, 4, 5, *range(12, 20)]
    assert plan.layout == "document_zigzag"


def test_padding_is_a_sequence_of_its_own():
    plan = RingFlashAttnPlan([window_of(5, 4), window_of(3)], 2)
    assert plan.padded_length == 10
    assert plan.sequence_edges(0).tolist() == [0, 5, 9, 10]
    assert plan.sequence_edges(1).tolist() == [0, 3, 10]
    assert plan.padding(1).sum(axis=1).tolist() == [1, 5]


def test_neighbouring_runs_of_one_document_are_one_sequence():
    window = Window(np.arange(12), [0, 3, 7, 12], "intra_doc", segment_docs=[4, 4, 9])
    assert RingFlashAttnPlan([window], 2).sequence_edges(0).tolist() == [0, 7, 12]


@pytest.mark.parametrize(
    ("mode", "layout", "exchange"),
    [("full", "zigzag", "ring"), ("full", "contiguous", "ring"), ("intra_doc", "auto", "auto")],
)
@pytest.mark.parametrize("sp_size", [2, 4])
def test_every_visible_pair_is_computed_once(sp_size, mode, layout, exchange):
    windows = [window_of(8, 16, 24, mode=mode), window_of(7, 1, 30, mode=mode)]
    plan = RingFlashAttnPlan(windows, sp_size, layout, exchange)
    native = BatchPlan(windows, 1)
    pairs = sum(plan.rank(rank).num_pairs for rank in range(sp_size))
    assert pairs == native.rank(0).num_pairs


SHAPE = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64}


def test_bytes_are_those_of_rings_and_gathers_that_prune_nothing():
    row, num_rows, hops = 2 * 2 * 64, 2 * 8, 3  # 2 windows of 32 tokens on 4 ranks
    windows = [window_of(32, mode="full"), window_of(30, mode="full")]
    for exchange, gradients in (("ring", 4 * 4), ("gather", 3 * 2)):
        plan = RingFlashAttnPlan(windows, 4, exchange=exchange)
        sent = [
            plan.bytes_sent(3, **SHAPE, element_size=2, forwards=f, backwards=b)
            for f, b in ((1, 0), (0, 1))
        ]
        keys = row * num_rows * hops * 2
        assert sent == [keys, keys + row * num_rows * gradients], exchange


REFUSED = {
    "anchor": ({"windows": [window_of(8, mode="anchor")]}, "mode 'anchor'.*no key that all"),
    "one rank": ({"sp_size": 1}, "sp = 1.*at least two ranks"),
    "balanced": ({"layout": "balanced"}, "layout 'balanced'.*contiguous and zigzag"),
    "ulysses": ({"exchange": "ulysses"}, "exchange 'ulysses'.*ring and gather"),
    "hybrid": ({"exchange": "hybrid", "ulysses": 2}, "exchange 'hybrid'"),
    "teams": ({"ulysses": 2}, "ulysses = 2.*does not swap heads"),
    "exact": ({"exact": True}, "exact.*rounds differently"),
    "mixed": ({"windows": [window_of(8), window_of(8, mode="full")]}, "modes full, intra_doc in"),
    "ring of contiguous documents": (
        {"layout": "contiguous", "exchange": "ring"},
        "'contiguous' with exchange 'ring': in mode intra_doc .* layout contiguous with exchange "
        "gather or layout zigzag with exchange ring",
    ),
    "zigzag lengths": (
        {"windows": [window_of(8, 12)], "sp_size": 4, "layout": "zigzag"},
        "document 1 of window 0 has 12 tokens.*2 sp = 8 equal chunks.*llama3",
    ),
    "interleaved": (
        {"windows": [Window(np.arange(12), [0, 3, 7, 12], "intra_doc", segment_docs=[0, 1, 0])]},
        "window 0 has documents in several runs",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_package_cannot_express_is_refused_by_name(name):
    options, message = REFUSED[name]
    with pytest.raises(UserError, match=message) as raised:
        plan_batch(
            **{"windows": [window_of(8)], "sp_size": 2, "backend": "ring_flash_attn"} | options
        )
    assert "native" in str(raised.value) or "choose one of them" in str(raised.value)


def test_an_unknown_backend_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match="did you mean 'ring_flash_attn'"):
        plan_batch([window_of(8)], 2, backend="ring_flash_atn")


def test_the_default_is_the_native_plan():
    assert type(plan_batch([window_of(8)], 2)) is BatchPlan
