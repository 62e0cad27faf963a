"""The order of windows is a function of (seed, epoch); a position means the same everywhere."""

import numpy as np
import pytest

from anchorcontext.data import Loader, View, epoch_order
from anchorcontext.errors import UserError
from anchorcontext.modes import get_mode

NUM_WINDOWS = 8


@pytest.fixture(scope="module")
def dataset(numbered):
    return numbered(NUM_WINDOWS)


def numbers(windows):
    return [int(window.input_ids[1]) for window in windows]


def global_stream(dataset, rounds, dp_size, micro, start=None, **options):
    """What all dp ranks get, in the order of global windows."""
    ranks = [
        Loader(dataset, dp_rank=r, dp_size=dp_size, micro_batch_windows=micro, **options)
        for r in range(dp_size)
    ]
    stream = []
    for loader in ranks:
        if start is not None:
            loader.load_state_dict(start)
    for _ in range(rounds):
        for loader in ranks:
            windows = next(loader)
            assert numbers(windows) == loader.last_ids and len(windows) == micro
            stream += loader.last_ids
    states = [loader.state_dict() for loader in ranks]
    assert all(state == states[0] for state in states)
    return stream, states[0]


def expected(count, seed=3):
    epochs = range(count // NUM_WINDOWS + 1)
    return np.concatenate([epoch_order(NUM_WINDOWS, seed, epoch) for epoch in epochs])[
        :count
    ].tolist()


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 2, 3])
def test_the_stream_is_the_same_for_every_dp_and_micro_batch(dataset, dp_size, micro):
    count = 24
    stream, state = global_stream(dataset, count // (dp_size * micro), dp_size, micro, seed=3)
    assert stream == expected(count)
    assert state["position"] == count and state["epoch"] == 3


@pytest.mark.parametrize("stop", [0, 3, 8, 12, 16])
@pytest.mark.parametrize(("dp_size", "micro"), [(1, 1), (2, 1), (2, 2), (4, 1)])
def test_a_resume_at_another_arrangement_continues_with_the_next_unseen_window(
    dataset, stop, dp_size, micro
):
    first, state = global_stream(dataset, stop, 1, 1, seed=3)
    second, _ = global_stream(dataset, 4, dp_size, micro, start=state, seed=3)
    assert first + second == expected(stop + 4 * dp_size * micro)


def test_hazard_28_ranks_of_an_sp_group_agree_and_groups_share_out_the_epoch(dataset):
    world, sp = 4, 2
    loaders = [Loader(dataset, dp_rank=rank // sp, dp_size=world // sp) for rank in range(world)]
    for _epoch in range(2):
        seen = []
        for _ in range(NUM_WINDOWS // 2):
            ids = [numbers(next(loader)) for loader in loaders]
            assert ids[0] == ids[1] and ids[2] == ids[3] and not set(ids[0]) & set(ids[2])
            seen += ids[0] + ids[2]
        assert sorted(seen) == list(range(NUM_WINDOWS))


def test_epochs_and_seeds_give_different_permutations():
    orders = [tuple(epoch_order(64, seed, epoch)) for seed in range(5) for epoch in range(5)]
    assert len(set(orders)) == 25
    assert all(sorted(order) == list(range(64)) for order in orders)
    assert epoch_order(5, 0, 3, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_the_order_never_changes_between_versions():
    assert epoch_order(8, 0, 0).tolist() == [4, 0, 1, 7, 6, 2, 5, 3]
    assert epoch_order(8, 7, 2).tolist() == [3, 0, 2, 1, 4, 7, 6, 5]


def test_each_place_is_drawn_evenly():
    first = np.bincount([epoch_order(4, seed, 0)[0] for seed in range(4000)], minlength=4)
    assert (abs(first - 1000) < 120).all()


def test_micro_batches_wider_than_the_dataset_roll_over(numbered):
    small = numbered(3)
    loader = Loader(small, micro_batch_windows=7, shuffle=False)
    next(loader)
    assert loader.last_ids == [0, 1, 2, 0, 1, 2, 0] and loader.epoch == 2


def test_mode_and_boundary_reach_the_windows(dataset):
    view = View(get_mode("intra_doc_reset"), boundary="train")
    (window,) = next(Loader(dataset, view=view, shuffle=False))
    assert window.mode.name == "intra_doc_reset"
    assert window.position_ids.tolist() == [0, 0, 1, 2, 3]
    assert window.labels.tolist() == [0, 0, 0, 0, -100]


def test_a_position_of_other_windows_or_another_order_is_refused(dataset, numbered):
    state = Loader(dataset, seed=3).state_dict()
    other = numbered(9)
    for loader, name in [
        (Loader(other, seed=3), "fingerprint"),
        (Loader(dataset, seed=4), "seed"),
        (Loader(dataset, seed=3, shuffle=False), "shuffle"),
    ]:
        with pytest.raises(UserError, match=f"saved with {name}"):
            loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dp_rank": 2, "dp_size": 2}, "dp_rank = 2"),
        ({"micro_batch_windows": 0}, "micro_batch_windows = 0"),
    ],
)
def test_impossible_arrangements_are_refused(dataset, options, message):
    with pytest.raises(UserError, match=message):
        Loader(dataset, **options)
