"""Windows as a run sees them: the config's controls applied to what was prepared."""

import numpy as np
import pytest

from anchorcontext.config import parse_config
from anchorcontext.data import (
    Loader,
    View,
    WindowDataset,
    WindowRecord,
    build_folder,
    configured_view,
    train_tokenizer,
)
from anchorcontext.errors import UserError
from anchorcontext.modes import MODES, with_controls

# Anchor 0, then documents 0 and 1, document 0 in two pieces; and the same behind copies.
SHARED = WindowRecord(
    np.array([0, 5, 6, 7, 8, 9]),
    np.array([0, 1, 3, 5, 6]),
    np.array([-1, 0, 1, 0]),
    np.array([0, 0, 0, 2]),
)
COPIED = WindowRecord(
    np.array([0, 5, 6, 0, 7, 8]),
    np.array([0, 1, 3, 4, 6]),
    np.array([0, 0, 1, 1]),
    np.array([-1, 0, -1, 0]),
)


def make_dataset(path, records, anchor_id=0):
    with build_folder(path) as builder:
        builder.write_documents([(["s", "s"], ["a", "b"], np.array([3, 3]))])
        builder.write_windows(records)
        builder.write_meta(
            {"anchor_id": anchor_id, "vocab_size": 300, "window_tokens": 6, "num_documents": 2}
        )
    return WindowDataset(path)


def make_config(**sections):
    return parse_config(
        {
            "run": {"name": "x"},
            "model": {"scratch": {"model_type": "llama"}},
            "data": {"path": "unused", "window_tokens": 6, "tokenizer": "unused"},
            "train": {"steps": 1, "windows_per_step": 1},
            **sections,
        }
    )


def anchored(**anchor):
    return make_config(attention={"anchor": anchor})


def test_a_config_without_controls_is_its_mode():
    for mode in MODES:
        assert configured_view(make_config(attention={"mode": mode})) == View(MODES[mode])


def test_every_control_reaches_the_mode():
    config = make_config(
        attention={"anchor": {"position": 5, "reset_positions": True, "copies": True}},
        positions={"clamp_first": True, "offset": 7},
    )
    mode = with_controls(
        "anchor", anchor_position=5, reset_positions=True, clamp_first=True, offset=7
    )
    assert configured_view(config) == View(mode, anchor_copies=True)
    hidden = configured_view(anchored(visible=False)).mode
    assert hidden == with_controls("anchor", anchor_visible=False)


@pytest.mark.parametrize(
    ("record", "mode", "ids"),
    [(SHARED, "anchor", [9, 5, 6, 7, 8, 9]), (COPIED, "intra_doc", [9, 5, 6, 9, 7, 8])],
)
def test_another_token_stands_where_the_anchor_and_its_copies_do(record, mode, ids):
    window = View(MODES[mode], anchor_token=9).window(record)
    assert window.input_ids.tolist() == ids and record.input_ids[0] == 0
    plain = View(MODES[mode]).window(record)
    assert window.labels.tolist() == plain.labels.tolist()  # nobody predicts an anchor


def test_copies_carry_the_other_token():
    window = View(anchor_token=9, anchor_copies=True).window(SHARED)
    assert window.input_ids.tolist() == [9, 5, 6, 9, 7, 8, 9]
    assert window.doc_ids.tolist() == [1, 1, 1, 2, 2, 2, 1]
    assert window.run_is_copy.tolist() == [True, False, True, False, False]
    planned = View(anchor_copies=True).apply(View(MODES["full"]).window(SHARED))
    assert planned.cu_seqlens.tolist() == window.cu_seqlens.tolist()


def test_a_loader_hands_out_the_windows_of_the_view(tmp_path):
    dataset = make_dataset(tmp_path / "w", [SHARED])
    view = configured_view(anchored(token=9, position=3), dataset)
    (window,) = next(Loader(dataset, view=view))
    assert (window.input_ids[0], window.position_ids[0]) == (9, 3)
    hidden = View(with_controls("anchor", anchor_visible=False))
    without = make_dataset(tmp_path / "none", [SHARED], anchor_id=None)
    with pytest.raises(UserError, match="needs windows with an anchor"):
        Loader(without, view=hidden)


def test_the_token_is_one_of_the_windows_tokenizer(tmp_path):
    dataset = make_dataset(tmp_path / "w", [SHARED])
    assert configured_view(anchored(token=299), dataset).anchor_token == 299
    with pytest.raises(UserError, match=r"attention.anchor.token = 300.*ids 0 to 299"):
        configured_view(anchored(token=300), dataset)
    tokenizer = train_tokenizer(["some text"], 262)
    tokenizer.save_pretrained(dataset.tokenizer_path)
    found = configured_view(anchored(token="eos"), dataset).anchor_token
    assert found == tokenizer.eos_token_id
    tokenizer.bos_token = None
    tokenizer.save_pretrained(dataset.tokenizer_path)
    with pytest.raises(UserError, match=r"attention.anchor.token = 'bos'.*has no BOS"):
        configured_view(anchored(token="bos"), dataset)
