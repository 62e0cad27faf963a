"""Packing puts every token into exactly one window, or names why it did not."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anchorcontext.data.packing import PACKERS, TOO_MANY, TOO_SHORT, pack
from anchorcontext.errors import UserError


def as_lists(packing, documents):
    """The windows as lists of segments of tokens."""
    s = packing.segments
    return [
        [
            documents[d][start : start + length]
            for d, start, length in zip(
                s.documents[a:b].tolist(),
                s.starts[a:b].tolist(),
                s.lengths[a:b].tolist(),
                strict=True,
            )
        ]
        for a, b in zip(s.offsets[:-1], s.offsets[1:], strict=True)
    ]


def test_hazard_17_all_ten_tokens_exactly_once():
    documents = [[1, 2, 3, 4], [5, 6], [7, 8, 9], [10]]
    packing = pack(np.array([4, 2, 3, 1]), 3, anchor=False)
    assert as_lists(packing, documents) == [[[1, 2, 3]], [[4], [5, 6]], [[7, 8, 9]], [[10]]]
    assert packing.dropped == {}
    assert packing.utilisation == 10 / 12


def test_the_anchor_takes_one_token_of_every_window():
    documents = [[1, 2, 3, 4], [5, 6], [7, 8, 9], [10]]
    packing = pack(np.array([4, 2, 3, 1]), 4, anchor=True)
    assert as_lists(packing, documents) == [[[1, 2, 3]], [[4], [5, 6]], [[7, 8, 9]], [[10]]]
    assert packing.utilisation == (10 + 4) / 16


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=30),
    window_tokens=st.integers(2, 50),
    anchor=st.booleans(),
    minimum=st.integers(1, 6),
    max_windows=st.none() | st.integers(1, 5),
    method=st.sampled_from(sorted(PACKERS)),
)
def test_every_token_is_kept_once_or_dropped_once(
    lengths, window_tokens, anchor, minimum, max_windows, method
):
    packing = pack(
        np.array(lengths, dtype=np.int64),
        window_tokens,
        anchor=anchor,
        method=method,
        min_document_tokens=minimum,
        max_windows=max_windows,
    )
    seen = [np.zeros(length, dtype=int) for length in lengths]
    s = packing.segments
    for document, start, length in zip(s.documents, s.starts, s.lengths, strict=True):
        assert length > 0 and start + length <= lengths[document]
        seen[document][start : start + length] += 1
    assert all((count <= 1).all() for count in seen)
    missing = sum(int((count == 0).sum()) for count in seen)
    assert missing == sum(part.num_tokens for part in packing.dropped.values())
    assert packing.num_kept + missing == sum(lengths)

    per_window = np.add.reduceat(s.lengths, s.offsets[:-1]) if len(s.lengths) else s.lengths
    assert (np.diff(s.offsets) > 0).all() and (per_window <= window_tokens - anchor).all()
    assert max_windows is None or packing.num_windows <= max_windows
    short = [i for i, length in enumerate(lengths) if length < minimum]
    assert not set(short) & set(s.documents.tolist())
    if short:
        assert packing.dropped[TOO_SHORT].documents.tolist() == short
    if method == "concat":
        assert (per_window[:-1] == window_tokens - anchor).all()
        assert (np.diff(s.documents) >= 0).all()


def test_windows_past_the_limit_are_dropped_by_name():
    packing = pack(np.array([5, 5, 2]), 4, anchor=True, max_windows=2, min_document_tokens=3)
    assert packing.num_windows == 2 and packing.num_kept == 6
    assert packing.dropped[TOO_SHORT].num_tokens == 2
    assert packing.dropped[TOO_MANY].num_tokens == 4
    assert packing.dropped[TOO_MANY].num_documents == 1


def test_a_window_without_room_is_refused():
    with pytest.raises(UserError, match=r"window_tokens = 1: .* the anchor and one token"):
        pack(np.array([3]), 1, anchor=True)


def test_packing_a_million_documents_takes_seconds_not_minutes():
    lengths = np.random.default_rng(0).integers(1, 700, size=1_000_000)
    packing = pack(lengths, 65_536, anchor=True)
    assert packing.num_kept == lengths.sum()
    assert packing.utilisation > 0.999
