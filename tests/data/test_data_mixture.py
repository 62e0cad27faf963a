"""Shares, held-out documents and their order are functions of contents and a seed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anchorcontext.data.draws import draw
from anchorcontext.data.mixture import copy_number, held_out, keep_shares, shuffled
from anchorcontext.errors import UserError


def corpus(counts, mean=300, seed=0):
    draws = np.random.default_rng(seed)
    sources = np.repeat(np.arange(len(counts)), counts)
    lengths = draws.integers(1, 2 * mean, len(sources))
    return lengths, sources, draw(seed, "test", np.arange(len(sources)))


def test_kept_tokens_have_the_shares_and_the_scarcest_source_is_whole():
    lengths, sources, hashes = corpus([4000, 3000, 500])
    shares = {"a": 3, "b": 2, "c": 1}
    keep = keep_shares(lengths, sources, ["a", "b", "c"], shares, hashes, seed=1)
    kept = np.bincount(sources, lengths * keep)
    assert keep[sources == 2].all()
    assert np.allclose(kept / kept.sum(), [1 / 2, 1 / 3, 1 / 6], atol=2e-4)
    other = keep_shares(lengths, sources, ["a", "b", "c"], shares, hashes, seed=2)
    assert (other != keep).any()


def test_what_is_kept_does_not_depend_on_the_order_of_the_corpus():
    lengths, sources, hashes = corpus([400, 900])
    mixed = np.random.default_rng(5).permutation(len(lengths))
    keep = keep_shares(lengths, sources, ["a", "b"], {"a": 1, "b": 1}, hashes, 0)
    again = keep_shares(
        lengths[mixed], sources[mixed], ["a", "b"], {"a": 1, "b": 1}, hashes[mixed], 0
    )
    assert (keep[mixed] == again).all()


def test_a_name_stands_for_the_sources_below_it():
    lengths, sources, hashes = corpus([100, 100, 100])
    names = ["web/new", "web/old", "books"]
    keep = keep_shares(lengths, sources, names, {"books": 1, "web": 1}, hashes, 0)
    kept = np.bincount(sources, lengths * keep)
    assert abs(kept[0] + kept[1] - kept[2]) < 600 and (kept > 0).all()
    for shares, message in [
        ({"books": 1.0}, "'web/new' belongs to no share"),
        ({"web": 1.0, "web/old": 1.0, "books": 1.0}, "'web/old' belongs to the shares web and"),
        ({"web": 1.0, "books": 1.0, "code": 1.0}, "data.shares.code: the corpus has no tokens"),
    ]:
        with pytest.raises(UserError, match=message):
            keep_shares(lengths, sources, names, shares, hashes, 0)


def test_a_corpus_that_is_listed_three_times_is_repeated_evenly():
    lengths, sources, hashes = corpus([2000, 300])
    books = sources == 1
    listed = [np.r_[values, values[books], values[books]] for values in (lengths, hashes)]
    sources = np.r_[sources, np.repeat([2, 3], books.sum())]
    names, shares = ["web", "books/1", "books/2", "books/3"], {"web": 1.0, "books": 0.4}
    keep = keep_shares(listed[0], sources, names, shares, listed[1], 0)
    kept = np.bincount(sources > 0, listed[0] * keep)
    assert np.allclose(kept / kept.sum(), [1 / 1.4, 0.4 / 1.4], atol=1e-3)
    times = keep[sources > 0].reshape(3, -1).sum(0)
    assert set(times) == {2, 3}, "all twice before any three times"
    order = shuffled(listed[1], 0)
    assert sorted(order) == list(range(len(order)))
    assert (np.diff(listed[1][order].astype(np.int64)) == 0).sum() < 5


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=30))
def test_copies_are_numbered_in_their_order(documents):
    hashes = np.array([h for h, _ in documents], dtype=np.uint64)
    groups = np.array([g for _, g in documents], dtype=np.int64)
    counted = [documents[:i].count(pair) for i, pair in enumerate(documents)]
    assert copy_number(hashes, groups).tolist() == counted


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=20), min_size=1, max_size=4),
    st.lists(st.floats(0.01, 100), min_size=4, max_size=4),
)
def test_no_source_is_further_from_its_share_than_its_longest_document(groups, weights):
    groups = [[*group, 1] for group in groups]
    lengths = np.concatenate([np.array(group) for group in groups])
    sources = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    names = [f"s{i}" for i in range(len(groups))]
    shares = dict(zip(names, weights, strict=False))
    hashes = draw(0, "test", np.arange(len(lengths)))
    keep = keep_shares(lengths, sources, names, shares, hashes, 0)
    totals = np.bincount(sources, lengths)
    used = np.array(list(shares.values()))
    targets = used * (totals / used).min()
    kept = np.bincount(sources, lengths * keep, len(groups))
    assert (abs(kept - targets) <= [max(group) / 2 + 1 for group in groups]).all()


def test_held_out_documents_are_the_same_in_any_order_and_grow_with_the_fraction():
    hashes = draw(3, "test", np.arange(20_000))
    small, large = held_out(hashes, 0.01), held_out(hashes, 0.1)
    assert abs(large.mean() - 0.1) < 0.01 and (large | ~small).all()
    assert (held_out(hashes[::-1], 0.1) == large[::-1]).all()
    assert not held_out(hashes, 0.0).any()


def test_a_shuffle_is_a_permutation_that_the_seed_decides():
    hashes = draw(3, "test", np.arange(1000))
    one, two = shuffled(hashes, 0), shuffled(hashes, 1)
    assert sorted(one) == sorted(two) == list(range(1000)) and (one != two).any()
