"""What stock transformers is told is what the modes say: two rules that share no code."""

import numpy as np
import pytest

from anchorcontext import Window
from anchorcontext.modes import MODES, visible, with_controls
from anchorcontext.parity.oracle import expected_mask, expected_positions

CONTROLS = (
    {},
    {"clamp_first": True},
    {"offset": 7},
    {"clamp_first": True, "offset": 7},
    {"anchor_position": 5, "clamp_first": True, "offset": 3},
)
OF_THE_ANCHOR = (
    {"anchor_visible": False},
    {"reset_positions": True},
    {"reset_positions": True, "clamp_first": True, "offset": 2},
)


def random_windows(mode, rng):
    """Documents in pieces; behind an anchor and behind copies of it, or with some copies."""
    lengths = rng.integers(1, 6, rng.integers(1, 6))
    docs = rng.integers(0, 3, len(lengths))
    if mode.has_anchor:
        edges = np.cumsum([0, 1, *lengths])
        window = Window(np.arange(edges[-1]), edges, mode, segment_docs=[7, *docs])
        return [window, window.with_anchor_copies()] if mode.anchor else [window]
    edges = np.cumsum([0, *lengths])
    copies = (lengths == 1) & (rng.random(len(lengths)) < 0.5)
    made = [{}, {"copies": copies}]
    return [Window(np.arange(edges[-1]), edges, mode, segment_docs=docs, **more) for more in made]


@pytest.mark.parametrize("name", MODES)
def test_masks_and_positions_of_every_mode_and_control(name):
    rng = np.random.default_rng(0)
    for controls in (*CONTROLS, *(OF_THE_ANCHOR if name == "anchor" else ())):
        mode = with_controls(name, **controls)
        for _ in range(25):
            for window in random_windows(mode, rng):
                assert (expected_mask(window) == visible(window.mode, window.doc_ids)).all()
                assert (expected_positions(window) == window.position_ids).all(), str(mode)
