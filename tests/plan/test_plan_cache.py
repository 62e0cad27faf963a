"""Plans by content: equal documents and options give one object, and no more are kept than said."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from anchorcontext.errors import UserError
from anchorcontext.parallel import make_plan, shard
from anchorcontext.plan import CostModel, cache
from anchorcontext.plan.cache import PlanCache
from anchorcontext.window import Window


def window_of(lengths, mode="intra_doc", seed=0, docs=None):
    edges = np.r_[0, np.cumsum(lengths)]
    ids = np.random.default_rng(seed).integers(0, 99, edges[-1])
    return Window(ids, edges, mode, segment_docs=docs)


def test_equal_documents_and_options_give_the_same_plan():
    plans = PlanCache()
    first = plans.plan([window_of([5, 7])], 2, layout="balanced", cost=CostModel())
    again = plans.plan([window_of([5, 7], seed=1)], 2, cost=CostModel(), layout="balanced")
    assert again is first and len(plans) == 1


@pytest.mark.parametrize(
    ("windows", "sp_size", "options"),
    [
        ([window_of([7, 5])], 2, {}),
        ([window_of([5, 7], "full")], 2, {}),
        ([window_of([5, 7], docs=[0, 0])], 2, {}),
        ([window_of([5, 7])] * 2, 2, {}),
        ([window_of([5, 7])], 3, {}),
        ([window_of([5, 7])], 2, {"layout": "zigzag"}),
        ([window_of([5, 7])], 2, {"exchange": "ring"}),
        ([window_of([5, 7])], 2, {"cost": replace(CostModel(), bytes_per_second=1e9)}),
        ([window_of([5, 7])], 2, {"exact": True}),
    ],
)
def test_whatever_a_plan_depends_on_gives_another(windows, sp_size, options):
    plans = PlanCache()
    base = plans.plan([window_of([5, 7])], 2)
    assert plans.plan(windows, sp_size, **options) is not base
    assert len(plans) == 2
    assert plans.plan([window_of([5, 7])], 2) is base


def test_the_plans_used_last_are_kept():
    plans = PlanCache(capacity=2)
    first, second = (plans.plan([window_of([n])], 1) for n in (1, 2))
    assert plans.plan([window_of([1])], 1) is first
    plans.plan([window_of([3])], 1)
    assert len(plans) == 2
    assert plans.plan([window_of([1])], 1) is first
    assert plans.plan([window_of([2])], 1) is not second
    plans.reserve(3)
    plans.plan([window_of([4])], 1)
    assert len(plans) == 3


def test_two_threads_get_one_object():
    plans, found, start = PlanCache(), [], threading.Barrier(8)
    interval = sys.getswitchinterval()

    def ask():
        start.wait()
        found.append(plans.plan([window_of([50, 70, 30])], 4))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len({id(plan) for plan in found}) == 1 and len(found) == 8


def test_a_mistake_is_not_kept():
    plans = PlanCache()
    for _ in range(2):
        with pytest.raises(UserError, match="layout 'zag'"):
            plans.plan([window_of([5])], 2, layout="zag")
    assert len(plans) == 0


def test_a_shared_plan_keeps_nobodys_tokens():
    """The second micro-batch of the same documents is sharded with its own tokens."""
    first, second = window_of([5, 7], seed=1), window_of([5, 7], seed=2)
    one, two = make_plan(first), make_plan(second)
    assert one.data is two.data
    assert one.windows == (first,) and two.windows == (second,)
    ids = shard(list(two.windows), two).input_ids[0]
    np.testing.assert_array_equal(ids.numpy(), second.input_ids)
    assert one.meter is not two.meter


def test_the_cache_of_the_process_is_bounded():
    for length in range(1, 3 * cache.CAPACITY):
        make_plan(window_of([length]))
    assert len(cache.PLANS) <= cache.PLANS.capacity
