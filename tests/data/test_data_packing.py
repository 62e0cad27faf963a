"""Packing puts every token into exactly one window, or names why it did not."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anchorcontext.data.packing import PACKERS, TOO_EMPTY, TOO_MANY, TOO_SHORT, pack
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


@st.composite
def corpora(draw):
    """Documents with what stands in front of them, and every option of ``pack``."""
    lengths = draw(st.lists(st.integers(0, 40), max_size=30))
    front = st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths))
    return np.array(lengths, dtype=np.int64), {
        "window_tokens": draw(st.integers(5, 50)),
        "anchor": draw(st.booleans()),
        "method": draw(st.sampled_from(sorted(PACKERS))),
        "max_truncation": draw(st.sampled_from([0.0, 0.2, 1.0])),
        "min_fill": draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])),
        "min_document_tokens": draw(st.integers(1, 6)),
        "max_windows": draw(st.none() | st.integers(1, 5)),
        "first": np.array(draw(front), dtype=np.int64),
        "again": np.array(draw(front), dtype=np.int64),
    }


@settings(max_examples=300, deadline=None)
@given(corpora())
def test_every_token_is_kept_once_or_dropped_once(corpus):
    lengths, options = corpus
    packing = pack(lengths, **options)
    seen = [np.zeros(length, dtype=int) for length in lengths]
    s = packing.segments
    for document, start, length in zip(s.documents, s.starts, s.lengths, strict=True):
        assert length > 0 and start + length <= lengths[document]
        seen[document][start : start + length] += 1
    assert all((count <= 1).all() for count in seen)
    missing = [int((count == 0).sum()) for count in seen]
    lost = np.zeros(len(lengths), dtype=int)
    for part in packing.dropped.values():
        np.add.at(lost, part.documents, part.tokens)
    assert lost.tolist() == missing
    assert packing.num_kept + sum(missing) == lengths.sum()
    short = np.flatnonzero((lengths > 0) & (lengths < options["min_document_tokens"]))
    assert not set(short.tolist()) & set(s.documents.tolist())
    if len(short):
        assert packing.dropped[TOO_SHORT].documents.tolist() == short.tolist()


@settings(max_examples=200, deadline=None)
@given(corpora())
def test_windows_keep_their_size_and_hold_a_document_once(corpus):
    lengths, options = corpus
    packing = pack(lengths, **options)
    s, size = packing.segments, options["window_tokens"]
    front = np.where(s.starts == 0, options["first"][s.documents], options["again"][s.documents])
    fill = np.bincount(s.windows, s.lengths + front, packing.num_windows) + options["anchor"]
    assert (np.diff(s.offsets) > 0).all() and (fill <= size).all()
    assert (fill >= options["min_fill"] * size).all()
    assert packing.num_front_tokens == front.sum()
    assert packing.utilisation == pytest.approx(fill.sum() / max(size * packing.num_windows, 1))
    assert packing.num_windows <= (options["max_windows"] or np.inf)
    pairs = list(zip(s.windows.tolist(), s.documents.tolist(), strict=True))
    assert pairs == sorted(set(pairs))
    number = np.bincount(s.documents, minlength=len(lengths))
    assert packing.num_cut == (number > 1).sum()
    if options["method"] == "whole_documents":
        assert (s.lengths == lengths[s.documents]).all()
    if options["method"] == "concat" and not front.any() and options["min_fill"] == 0:
        assert (fill[:-1] == size).all() and (np.diff(s.documents) >= 0).all()


def test_concat_with_tokens_in_front_goes_on_where_it_stopped():
    lengths, front = np.array([7, 2, 6]), np.array([1, 2, 1])
    packing = pack(lengths, 6, anchor=True, first=front, again=front)
    s = packing.segments
    # | f.... | f... | fff.. is cut behind its front: no room for a token of document 1 | ...
    windows = [
        list(zip(s.documents[a:b], s.starts[a:b], s.lengths[a:b], strict=True))
        for a, b in zip(s.offsets[:-1], s.offsets[1:], strict=True)
    ]
    assert windows == [[(0, 0, 4)], [(0, 4, 3)], [(1, 0, 2)], [(2, 0, 4)], [(2, 4, 2)]]


def test_a_window_that_is_not_full_enough_is_dropped_by_name():
    lengths = np.array([4, 2, 3, 1])
    assert pack(lengths, 3, anchor=False).num_windows == 4
    packing = pack(lengths, 3, anchor=False, min_fill=1.0)
    assert packing.num_windows == 3
    assert packing.dropped[TOO_EMPTY].documents.tolist() == [3]
    assert packing.dropped[TOO_EMPTY].num_tokens == 1


def test_windows_past_the_limit_are_dropped_by_name():
    packing = pack(np.array([5, 5, 2]), 4, anchor=True, max_windows=2, min_document_tokens=3)
    assert packing.num_windows == 2 and packing.num_kept == 6
    assert packing.dropped[TOO_SHORT].num_tokens == 2
    assert packing.dropped[TOO_MANY].num_tokens == 4
    assert packing.dropped[TOO_MANY].num_documents == 1


def test_a_window_without_room_is_refused():
    with pytest.raises(UserError, match=r"window_tokens = 1: .* the anchor and one token"):
        pack(np.array([3]), 1, anchor=True)
    with pytest.raises(UserError, match=r"at least 7 tokens in front of a document and one token"):
        pack(np.array([3]), 7, anchor=False, first=np.array([0]), again=np.array([7]))


def test_a_billion_tokens_would_take_two_minutes_and_two_gigabytes():
    """A twentieth of it, 150,000 documents, in a twentieth of the time; memory has a floor."""
    script = """
import resource, time
import numpy as np
from anchorcontext.data.packing import pack
lengths = np.random.default_rng(0).lognormal(np.log(200), 1.0, 150_000).astype(np.int64) + 1
front = np.full(len(lengths), 4)
before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
for method in ("concat", "best_fit", "whole_documents"):
    packing = pack(lengths, 4096, anchor=True, method=method, max_truncation=0.01, again=front)
    assert packing.utilisation > 0.99
seconds = (time.process_time() - start) / 3
print(seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    seconds, mebibytes = map(float, done.stdout.split())
    assert seconds < 120 / 20
    assert mebibytes < 100
