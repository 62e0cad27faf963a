"""Modes varied for experiments: positions and masks by hand, equalities, what is refused."""

import numpy as np
import pytest

from anchorcontext import Window, make_plan, shard
from anchorcontext.errors import UserError
from anchorcontext.modes import MODES, get_mode, visible, with_controls
from anchorcontext.plan.cache import PlanCache

ANCHOR = 1


def window(mode, lengths=(3, 2), **controls):
    documents = [np.arange(3, 3 + n) for n in lengths]
    anchor = ANCHOR if get_mode(mode).has_anchor else None
    return Window.from_documents(documents, anchor, with_controls(mode, **controls))


@pytest.mark.parametrize(
    ("mode", "controls", "positions"),
    [
        ("anchor", {}, [0, 1, 2, 3, 4, 5]),
        ("anchor", {"anchor_visible": False}, [0, 1, 2, 3, 4, 5]),
        ("anchor", {"anchor_position": 9}, [9, 1, 2, 3, 4, 5]),
        ("anchor", {"reset_positions": True}, [0, 1, 2, 3, 1, 2]),
        ("anchor", {"reset_positions": True, "anchor_position": 9}, [9, 1, 2, 3, 1, 2]),
        ("anchor", {"clamp_first": True}, [0, 0, 2, 3, 0, 5]),
        ("anchor", {"offset": 10}, [0, 11, 12, 13, 14, 15]),
        ("full", {"clamp_first": True}, [0, 1, 2, 0, 4]),
        ("full", {"clamp_first": True, "offset": 10}, [0, 11, 12, 0, 14]),
        ("intra_doc", {"clamp_first": True}, [0, 1, 2, 0, 4]),
        ("intra_doc", {"offset": 10}, [10, 11, 12, 13, 14]),
        ("intra_doc_reset", {"clamp_first": True, "offset": 10}, [0, 11, 12, 0, 11]),
    ],
)
def test_positions_are_those_of_the_table(mode, controls, positions):
    assert window(mode, **controls).position_ids.tolist() == positions


@pytest.mark.parametrize("mode", MODES)
def test_no_control_is_the_mode_itself(mode):
    assert with_controls(mode) == MODES[mode] and str(MODES[mode]) == mode


def test_only_a_hidden_anchor_changes_who_sees_whom():
    plain = window("anchor")
    for controls in ({"anchor_position": 9}, {"reset_positions": True}, {"clamp_first": True}):
        other = window("anchor", **controls)
        assert (visible(other.mode, other.doc_ids) == visible(plain.mode, plain.doc_ids)).all()
    hidden = window("anchor", anchor_visible=False)
    assert visible(hidden.mode, hidden.doc_ids)[1:, 0].sum() == 0
    alone = hidden.with_mode("intra_doc")
    assert (visible(hidden.mode, hidden.doc_ids) == visible(alone.mode, alone.doc_ids)).all()


def test_an_interleaved_document_is_clamped_once():
    mode = with_controls("intra_doc", clamp_first=True)
    pieces = Window(np.arange(7), [0, 2, 5, 7], mode, segment_docs=[4, 1, 4])
    assert pieces.position_ids.tolist() == [0, 1, 0, 3, 4, 5, 6]


def test_a_prefix_keeps_the_controls():
    whole = window("anchor", (3, 4), clamp_first=True, offset=5)
    assert whole.prefix(6).position_ids.tolist() == whole.position_ids[:6].tolist()


def test_copies_have_the_documents_of_the_shared_anchor_and_its_positions():
    shared = Window(
        np.arange(10),
        [0, 1, 3, 6, 8, 10],
        with_controls("anchor", anchor_position=4, clamp_first=True),
        segment_docs=[9, 2, 0, 2, 5],
        loss_mask=np.arange(10) != 4,
    )
    copied = shared.with_anchor_copies()
    assert copied.input_ids.tolist() == [0, 1, 2, 0, 3, 4, 5, 6, 7, 0, 8, 9]
    assert copied.doc_ids.tolist() == [2, 2, 2, 0, 0, 0, 0, 2, 2, 5, 5, 5]
    assert copied.run_is_copy.tolist() == [True, False, True, False, False, True, False]
    own = ~copied.anchor_copies
    assert copied.position_ids[own].tolist() == shared.position_ids[1:].tolist()
    assert copied.position_ids[~own].tolist() == [4, 4, 4]
    assert copied.labels[own].tolist() == shared.labels[1:].tolist()
    assert copied.num_targets == shared.num_targets


def test_documents_that_restart_behind_an_anchor_are_those_that_restart_behind_a_copy():
    copied = window("anchor", reset_positions=True).with_anchor_copies()
    assert copied.mode == MODES["intra_doc_reset"]
    assert copied.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2]


@pytest.mark.parametrize(
    ("mode", "controls", "message"),
    [
        ("anchor", {"anchor_position": -1}, "anchor_position = -1"),
        ("full", {"offset": -1}, "offset = -1"),
        ("full", {"anchor_visible": False}, "anchor_visible = False in mode 'full'"),
        ("intra_doc", {"reset_positions": True}, "reset_positions = True in mode 'intra_doc'"),
    ],
)
def test_controls_without_meaning_are_refused(mode, controls, message):
    with pytest.raises(UserError, match=message):
        with_controls(mode, **controls)


def test_copies_of_an_anchor_that_is_not_there_are_refused():
    hidden = window("anchor", anchor_visible=False)
    for other in (hidden, window("full")):
        with pytest.raises(UserError, match="no anchor is seen there"):
            other.with_anchor_copies()
    train = Window(np.arange(4), [0, 1, 4], "anchor", boundary="train")
    with pytest.raises(UserError, match="would have to predict a copy"):
        train.with_anchor_copies()
    with pytest.raises(UserError, match="token 0 is the anchor and must be its own document"):
        Window(np.arange(4), [0, 2, 4], hidden.mode)


def test_a_plan_belongs_to_one_set_of_controls():
    """In the cache, and where a shard is cut: positions come from the window that was planned."""
    cache, plain = PlanCache(), window("anchor")
    varied = [window("anchor", **c) for c in ({"clamp_first": True}, {"anchor_visible": False})]
    plans = [cache.plan([w], 1) for w in (plain, *varied, plain)]
    assert len({id(plan) for plan in plans}) == 3 and plans[0] is plans[-1]
    with pytest.raises(UserError):
        shard(varied[0], make_plan(plain))
