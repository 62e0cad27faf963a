"""Windows read ahead: the same stream and state, errors in their place, no thread left behind."""

from __future__ import annotations

import threading
import traceback

import pytest

from anchorcontext.data.loader import Loader
from anchorcontext.data.prefetch import Prefetch

NUM_WINDOWS = 7
WAIT = 10.0


def threads():
    return [t for t in threading.enumerate() if t.name.startswith("anchorcontext-data")]


@pytest.fixture(scope="module")
def dataset(numbered):
    """7 windows: epochs end inside micro-batches of 2 and rounds of 4."""
    return numbered(NUM_WINDOWS)


@pytest.fixture
def make(dataset):
    loaders = []

    def loader(ahead=0, prepare=None, **options):
        made = Loader(options.pop("dataset", dataset), seed=3, **options)
        if ahead:
            made.prefetch(ahead, prepare)
        loaders.append(made)
        return made

    yield loader
    for made in loaders:
        made.close()
    assert threads() == []


def draw(loader, count):
    return [[int(w.input_ids[1]) for w in next(loader)] for _ in range(count)]


@pytest.mark.parametrize("ahead", [1, 3, 8])
@pytest.mark.parametrize(("dp_size", "micro"), [(1, 1), (2, 2), (3, 1)])
def test_stream_and_state_are_those_without_prefetching(make, ahead, dp_size, micro):
    places = {"dp_rank": dp_size - 1, "dp_size": dp_size, "micro_batch_windows": micro}
    plain, prefetching = make(**places), make(ahead, **places)
    for _ in range(3 * NUM_WINDOWS):
        assert draw(plain, 1) == draw(prefetching, 1)
        assert plain.last_ids == prefetching.last_ids
        assert plain.state_dict() == prefetching.state_dict()


def test_coming_windows_are_prepared_in_the_background(make):
    """Without another ``next``: 3 rounds ahead of the one that was handed out."""
    seen, done = [], threading.Event()

    def prepare(windows):
        seen.append((threading.current_thread().name, int(windows[0].input_ids[1])))
        if len(seen) == 4:
            done.set()

    loader = make(3, prepare)
    first = draw(loader, 1)
    assert done.wait(WAIT)
    assert all(name.startswith("anchorcontext-data") for name, _ in seen)
    assert first + draw(loader, 3) == [[number] for _, number in seen[:4]]


def test_going_back_gives_the_same_windows_again(make):
    """As a parity check does between two steps: look at the next windows, then train on them."""
    plain, prefetching = make(), make(2)
    draw(plain, 3), draw(prefetching, 3)
    state = prefetching.state_dict()
    peeked = draw(prefetching, 1)
    prefetching.load_state_dict(state)
    assert prefetching.last_ids == []
    again = draw(prefetching, 4)
    assert again[:1] == peeked and again == draw(plain, 4)


def test_a_resumed_loader_continues_with_the_first_window_that_was_not_handed_out(make):
    first = make(4)
    draw(first, 2)  # 4 more are on their way or ready
    state = first.state_dict()
    assert state["position"] == 2
    resumed = make(4)
    resumed.load_state_dict(state)
    assert draw(resumed, 5) == draw(first, 5)


class Broken:
    """The windows, of which one cannot be read until it is mended."""

    def __init__(self, dataset, number):
        self.whole, self.number = dataset, number
        self.path, self.anchor_id = dataset.path, dataset.anchor_id
        self.fingerprint = dataset.fingerprint

    def __len__(self):
        return len(self.whole)

    def __getitem__(self, index):
        if index == self.number:
            raise OSError(f"window {index} is gone")
        return self.whole[index]


def test_an_error_surfaces_at_its_own_window_with_its_traceback(make, dataset):
    order = Loader(dataset, seed=3).window_ids(0, 3)
    broken = Broken(dataset, order[2])
    loader = make(3, dataset=broken)
    assert draw(loader, 2) == [[number] for number in order[:2]]
    for _ in range(2):
        with pytest.raises(OSError, match="is gone") as raised:
            next(loader)
        text = "".join(traceback.format_exception(raised.value))
        assert "__getitem__" in text and "_micro_batch" in text
        assert loader.position == 2
    broken.number = None
    assert draw(loader, 1) == [[order[2]]]


def test_an_error_of_a_window_that_nobody_asks_for_is_nobodys(make, dataset):
    order = Loader(dataset, seed=3).window_ids(0, 2)
    loader = make(1, dataset=Broken(dataset, order[1]))
    draw(loader, 1)
    loader.close()


def test_closing_ends_the_thread_and_the_loader_goes_on_without(make):
    loader = make(4)
    ahead = draw(loader, 2)
    assert len(threads()) == 1
    loader.close()
    assert threads() == []
    assert ahead + draw(loader, 2) == draw(make(), 4)
    assert threads() == []


def test_only_what_may_be_asked_for_is_kept():
    made = []
    prefetch = Prefetch(lambda position: made.append(position) or position)
    assert [prefetch.get(position, [position + 1]) for position in (0, 1, 5, 6)] == [0, 1, 5, 6]
    prefetch.close()
    assert made[:3] == [0, 1, 2] or made[:2] == [0, 1]  # 2 was dropped, unless it had begun
    assert made.count(6) == 1
