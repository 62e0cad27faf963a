"""Learning rate factors, step by step."""

import itertools
import math

import pytest

from anchorcontext.train.schedule import learning_rate_factor


def factors(kind, warmup, total, ratio=0.1):
    factor = learning_rate_factor(kind, warmup_steps=warmup, total_steps=total, min_ratio=ratio)
    return [factor(step) for step in range(total)]


def test_constant_without_warmup_is_the_papers_schedule():
    assert factors("constant", 0, 5) == [1.0] * 5


def test_warmup_rises_linearly_to_the_full_rate():
    assert factors("constant", 4, 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_falls_from_one_to_the_minimum_at_the_last_step():
    values = factors("cosine", 2, 11, ratio=0.2)
    assert values[:3] == [0.5, 1.0, 1.0]
    assert values[-1] == pytest.approx(0.2)
    assert values[6] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert all(later <= earlier for earlier, later in itertools.pairwise(values[2:]))


def test_cosine_never_goes_below_its_minimum_after_the_end():
    factor = learning_rate_factor("cosine", warmup_steps=0, total_steps=4, min_ratio=0.3)
    assert factor(100) == pytest.approx(0.3)


def test_runs_as_short_as_their_warmup():
    assert factors("cosine", 3, 3) == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert factors("cosine", 0, 1) == [1.0]
