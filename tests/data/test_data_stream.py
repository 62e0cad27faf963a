"""One stream of windows, whoever shares it out: dp, sp, accumulation, prefetching, kills.

Every rank of a run is a ``Loader`` here, at the place that the mesh gives it. A *life* of the run
hands out micro-batches until it is killed; what it did since its last checkpoint is lost, and the
next life goes on from there, with other ranks where it likes.
"""

import itertools
import json
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anchorcontext.data import Loader, epoch_order
from anchorcontext.parallel import Mesh

SEED = 3
SIZES = (1, 2, 4)
LAYOUTS = list(itertools.product(SIZES, SIZES))


@dataclass(frozen=True)
class Life:
    """``steps`` of ``accumulation`` micro-batches, then the kill after so many of the next step."""

    dp: int
    sp: int
    micro: int
    accumulation: int
    steps: int
    killed_after: int = 0
    ahead: int = 0


def live(dataset, life, state=None):
    """The global windows that were trained on for good, and the state of the last checkpoint."""
    meshes = [Mesh(life.dp * life.sp, rank, life.dp, life.sp) for rank in range(life.dp * life.sp)]
    loaders = [
        Loader(
            dataset,
            dp_rank=mesh.dp_rank,
            dp_size=mesh.dp,
            micro_batch_windows=life.micro,
            seed=SEED,
        )
        for mesh in meshes
    ]
    for loader in loaders:
        if life.ahead:
            loader.prefetch(life.ahead)
        if state is not None:
            loader.load_state_dict(json.loads(state))
    stream, saved = [], state
    try:
        for _ in range(life.steps):
            stream += [n for _ in range(life.accumulation) for n in next_round(loaders, meshes)]
            (saved,) = {json.dumps(loader.state_dict()) for loader in loaders}
        for _ in range(life.killed_after):
            next_round(loaders, meshes)
    finally:
        for loader in loaders:
            loader.close()
    return stream, saved


def next_round(loaders, meshes):
    """What the ranks read in one micro-batch, in global order: one SP group after the other."""
    read = {}
    for loader, mesh in zip(loaders, meshes, strict=True):
        windows = [int(window.input_ids[1]) for window in next(loader)]
        assert windows == loader.last_ids
        assert read.setdefault(mesh.dp_rank, windows) == windows, "an SP group reads one window"
    return [number for dp_rank in sorted(read) for number in read[dp_rank]]


def expected(num_windows, count):
    """Epoch after epoch, each with every window once."""
    epochs = [epoch_order(num_windows, SEED, e).tolist() for e in range(-(-count // num_windows))]
    assert all(sorted(epoch) == list(range(num_windows)) for epoch in epochs)
    return list(itertools.chain(*epochs))[:count]


# Twelve windows in steps of eight: the second step lies over the edge of an epoch, the third ends
# at one.
NUM_WINDOWS, STEP = 12, 8
KILLS = {
    "before a step": (0, 0),
    "inside the first accumulation": (0, 1),
    "in an epoch": (1, 0),
    "inside the accumulation over an epoch's edge": (1, 1),
    "at an epoch's edge": (3, 0),
}


def arrangement(layout, steps, micro=1, **options):
    dp, sp = layout
    return Life(dp, sp, micro, STEP // (dp * micro), steps, **options)


@pytest.mark.parametrize("ahead", [0, 2, 9])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_stream_is_one_for_every_layout_with_and_without_prefetching(numbered, layout, ahead):
    for micro in (1, 2):
        stream, state = live(numbered(NUM_WINDOWS), arrangement(layout, 4, micro, ahead=ahead))
        assert stream == expected(NUM_WINDOWS, 4 * STEP)
        assert json.loads(state)["position"] == 4 * STEP


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("kill", KILLS.values(), ids=KILLS)
def test_a_kill_and_a_resume_at_any_layout_go_on_with_the_next_unseen_window(numbered, kill, ahead):
    steps, killed_after = kill
    every_pair = itertools.product(LAYOUTS, LAYOUTS)
    each_once = zip(LAYOUTS, LAYOUTS[4:] + LAYOUTS[:4], strict=True)  # 128 threads would take long
    for before, after in each_once if ahead else every_pair:
        first = arrangement(before, steps, killed_after=killed_after, ahead=ahead)
        trained, state = live(numbered(NUM_WINDOWS), first)
        more, _ = live(numbered(NUM_WINDOWS), arrangement(after, 2, ahead=ahead), state)
        assert trained + more == expected(NUM_WINDOWS, (steps + 2) * STEP), (before, after)


lives = st.builds(
    Life,
    dp=st.sampled_from(SIZES),
    sp=st.sampled_from((1, 2)),
    micro=st.integers(1, 3),
    accumulation=st.integers(1, 4),
    steps=st.integers(0, 3),
    killed_after=st.integers(0, 3),
    ahead=st.sampled_from((0, 2)),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(num_windows=st.integers(1, 17), run=st.lists(lives, min_size=1, max_size=4))
def test_uneven_numbers_of_windows_leave_no_rank_without_work(numbered, num_windows, run):
    """Neither dp nor a step divides an epoch: steps take on from the next epoch, and a window comes
    again only when all others of its epoch have been seen."""
    trained, state = [], None
    for life in run:
        more, state = live(numbered(num_windows), life, state)
        assert len(more) == life.steps * life.accumulation * life.dp * life.micro
        trained += more
    assert trained == expected(num_windows, len(trained))
