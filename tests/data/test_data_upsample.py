"""Length upsampling: a tenth of the short documents, the same shares of the sources."""

import numpy as np
import pytest

from anchorcontext.data.upsample import upsample as upsample_by_hash
from anchorcontext.plan.mixes import SIGMA, SOURCES


def upsample(lengths, sources, **options):
    return upsample_by_hash(lengths, sources, np.arange(len(lengths)), **options)


@pytest.fixture(scope="module")
def slimpajama():
    """100,000 documents with the sources, shares and median lengths of SlimPajama."""
    rng = np.random.default_rng(0)
    shares = np.array([share for share, _ in SOURCES.values()])
    medians = np.array([median for _, median in SOURCES.values()])
    chance = shares / medians
    sources = rng.choice(len(SOURCES), 100_000, p=chance / chance.sum())
    lengths = rng.lognormal(np.log(medians[sources]), SIGMA).astype(np.int64) + 1
    return lengths, sources


def token_shares(lengths, sources):
    tokens = np.bincount(sources, lengths)
    return tokens / tokens.sum()


def test_shares_of_the_sources_stay(slimpajama):
    lengths, sources = slimpajama
    kept = upsample(lengths, sources)
    before, after = token_shares(lengths, sources), token_shares(kept, sources)
    assert abs(before - [share for share, _ in SOURCES.values()]).max() < 0.02
    assert (abs(after / before - 1) < 0.005).all()
    assert 0.1 < kept.sum() / lengths.sum() < 0.2


def test_short_documents_have_a_tenth_of_the_chance_of_long_ones(slimpajama):
    lengths, sources = slimpajama
    kept = upsample(lengths, sources)
    short, whole = lengths < 4096, kept == lengths
    for source in range(len(SOURCES)):
        mine = sources == source
        if (mine & short).sum() < 1000 or (mine & ~short).sum() < 100:
            continue
        ratio = whole[mine & short].mean() / whole[mine & ~short].mean()
        assert ratio == pytest.approx(0.1, abs=0.03), source
    # The source that shrinks most keeps its long documents: no token is thrown away for nothing.
    ratios = np.bincount(sources, kept == lengths) / np.bincount(sources)
    c4 = list(SOURCES).index("c4")
    assert whole[(sources == c4) & ~short].mean() > 0.9 and ratios[c4] < 0.15


def test_the_choice_does_not_depend_on_the_order_of_the_documents(slimpajama):
    lengths, sources = (array[:2000] for array in slimpajama)
    order = np.random.default_rng(1).permutation(2000)
    kept = upsample_by_hash(lengths[order], sources[order], order)
    assert (kept == upsample(lengths, sources)[order]).all()


def test_one_document_a_source_is_cut_and_none_repeated(slimpajama):
    lengths, sources = slimpajama
    kept = upsample(lengths, sources)
    assert ((kept >= 0) & (kept <= lengths)).all()
    cut = (kept > 0) & (kept < lengths)
    assert (np.bincount(sources[cut], minlength=len(SOURCES)) <= 1).all()


def test_the_choice_is_a_function_of_the_seed(slimpajama):
    lengths, sources = slimpajama
    assert (upsample(lengths, sources, seed=1) == upsample(lengths, sources, seed=1)).all()
    same = (upsample(lengths, sources, seed=1) > 0) & (upsample(lengths, sources, seed=2) > 0)
    assert same.sum() < 0.3 * (upsample(lengths, sources, seed=1) > 0).sum()


@pytest.mark.parametrize(
    ("lengths", "sources", "expected"),
    [
        ([], [], 0),
        ([5000, 6000], [0, 0], 11000),  # nothing is short
        ([100] * 10, [0] * 10, 100),
        ([100] * 3 + [9000], [0, 0, 0, 1], 30 + 900),  # a source of three short documents
        ([0, 0], [0, 2], 0),
    ],
)
def test_small_corpora_keep_exact_shares(lengths, sources, expected):
    kept = upsample(np.array(lengths, dtype=np.int64), np.array(sources, dtype=np.int64))
    assert kept.sum() == expected


def test_the_choice_never_changes_between_versions():
    kept = upsample(np.full(12, 10), np.zeros(12, dtype=int), below=11, keep=0.25, seed=7)
    assert np.flatnonzero(kept).tolist() == [0, 5, 6]
