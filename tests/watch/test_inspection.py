"""An inspection tells what the plan does, and the drawings show it."""

import json

import numpy as np
import pytest
import torch

from anchorcontext import Window
from anchorcontext.errors import UserError
from anchorcontext.modes import MODES, visible
from anchorcontext.parallel.plan import Plan
from anchorcontext.watch.draw import draw_layouts, draw_modes, draw_window, mask_image
from anchorcontext.watch.draw_text import ASCII, mask_text
from anchorcontext.watch.inspection import ModelTraffic, inspect_window


def window_of(*lengths: int, mode: str = "anchor") -> Window:
    return Window.from_documents([[1] * length for length in lengths], 0, mode)


def test_the_documents_table_covers_the_window():
    rows = inspect_window(window_of(7, 13, 5, mode="intra_doc_reset")).documents
    assert [(row.start, row.stop) for row in rows] == [(0, 1), (1, 8), (8, 21), (21, 26)]
    assert [(row.first_position, row.last_position) for row in rows[1:]] == [
        (0, 6),
        (0, 12),
        (0, 4),
    ]
    assert [row.targets for row in rows] == [0, 6, 12, 4]
    assert sum(row.share for row in rows) == pytest.approx(1.0)


@pytest.mark.parametrize("sp", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("mode", MODES)
def test_the_ranks_hold_every_token_once_and_compute_every_pair_once(mode, layout, sp):
    window = window_of(7, 13, 5, mode=mode)
    inspection = inspect_window(window, sp=sp, layout=layout)
    held = np.concatenate([np.arange(*run) for rank in inspection.ranks for run in rank.holds])
    assert sorted(held.tolist()) == list(range(inspection.plan.padded_length))
    assert sum(rank.tokens for rank in inspection.ranks) == window.num_tokens
    pairs = int(visible(window.mode, window.doc_ids).sum())
    assert inspection.pairs == pairs == sum(rank.pairs for rank in inspection.ranks)
    assert sum(rank.load for rank in inspection.ranks) == pytest.approx(sp)


@pytest.mark.parametrize("exchange", ["ring", "gather"])
def test_rows_and_bytes_are_those_of_the_plan(exchange):
    model = ModelTraffic(
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        element_size=2,
        gradient_size=4,
        forwards=3 * 2,
    )
    window = window_of(7, 13, 5, 30)
    inspection = inspect_window(window, sp=4, layout="zigzag", exchange=exchange, model=model)
    received = inspection.traffic.sum(axis=0)
    for rank, row in enumerate(inspection.ranks):
        plan = Plan(inspection.plan)
        plan.sp_rank, plan.mine = rank, inspection.plan.rank(rank)
        assert row.rows_sent == plan.mine.forward_rows_sent
        assert row.rows_received == received[rank]
        assert row.bytes_sent == plan.predicted_bytes(
            num_layers=3,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            dtype=torch.bfloat16,
            forwards=2,
        )
    assert inspection.rows_moved < inspection.rows_unpruned
    assert sum(row.bytes_sent for row in inspection.ranks) > 0


def test_ring_flash_attn_moves_every_row_to_every_rank():
    inspection = inspect_window(
        window_of(7, 13, 5, 30, mode="full"), sp=4, backend="ring_flash_attn"
    )
    assert inspection.rows_moved == inspection.rows_unpruned
    assert inspection.as_dict()["backend"] == "ring_flash_attn"
    rows = inspection.plan.local_length
    assert [rank.rows_sent for rank in inspection.ranks] == [3 * rows] * 4
    assert [rank.gradient_rows_sent for rank in inspection.ranks] == [4 * rows] * 4


def test_ranks_that_swap_heads_share_their_teams_work_and_send_no_rows():
    inspection = inspect_window(window_of(7, 13), sp=2, exchange="ulysses")
    assert [rank.pairs for rank in inspection.ranks] == [inspection.pairs / 2] * 2
    assert inspection.rows_moved == 0 and inspection.balance == 1.0
    assert inspection.as_dict()["exchange"] == "ulysses"


def test_the_choice_of_auto_and_its_reason_are_part_of_the_report():
    found = inspect_window(window_of(70, 130), sp=2).as_dict()
    assert found["choice"]["exchange"] == found["exchange"]
    assert found["choice"]["reason"].startswith(found["exchange"])
    assert inspect_window(window_of(7, 13), sp=2, exchange="ring").as_dict()["choice"] is None


def test_one_rank_sends_nothing():
    inspection = inspect_window(window_of(7, 13))
    assert inspection.rows_moved == 0 and inspection.balance == 1.0


def test_the_report_is_json():
    report = json.loads(json.dumps(inspect_window(window_of(3, 4), sp=2).as_dict()))
    assert report["mode"] == "anchor" and len(report["ranks"]) == 2


def test_the_text_shows_the_mask_token_by_token():
    drawn = mask_text(inspect_window(window_of(2, 3)), characters=ASCII).splitlines()
    cells = [line.split("|")[1] for line in drawn if "|" in line]
    assert cells == ["##", "####", "######", "##....##", "##....####", "##....######"]


@pytest.mark.parametrize("mode", MODES)
def test_the_text_of_a_small_window_is_the_dense_mask(mode):
    window = window_of(4, 1, 6, mode=mode)
    drawn = mask_text(inspect_window(window), characters=ASCII).splitlines()
    rows = [line.split("|")[1][::2] for line in drawn if "|" in line]
    mask = visible(window.mode, window.doc_ids)
    for query, row in enumerate(rows):
        assert [cell == "#" for cell in row] == mask[query, : query + 1].tolist()


def test_a_long_window_keeps_its_anchor_column_and_names_the_ranks():
    inspection = inspect_window(window_of(3000, 2500, 4000), sp=2, layout="contiguous")
    rows = [line for line in mask_text(inspection, 20, ASCII).splitlines() if "|" in line]
    assert len(rows) == 20 + 1
    assert all(row.split("|")[1].startswith("##") for row in rows[:-1])
    margins = [row.split("|")[0].split() for row in rows[:-1]]
    assert margins[0] == ["0", "0", "0"] and margins[-1][1:] == ["3", "1"]


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_the_picture_colours_exactly_the_visible_pairs(mode):
    doc_ids = np.repeat(np.arange(4), [1, 5, 3, 6])
    image = mask_image(mode, doc_ids)
    hidden, above = image[-1, 1] if mode.same_document else None, image[0, -1]
    mask = visible(mode, doc_ids)
    for query, key in np.ndindex(mask.shape):
        if key > query:
            np.testing.assert_array_equal(image[query, key], above)
        elif not mask[query, key]:
            np.testing.assert_array_equal(image[query, key], hidden)
        else:
            assert not np.array_equal(image[query, key], above)
            assert hidden is None or not np.array_equal(image[query, key], hidden)
    if mode.anchor:
        assert (image[:, 0] == image[0, 0]).all()


@pytest.mark.parametrize("sp", [1, 4])
def test_a_window_is_drawn_to_a_png(tmp_path, sp):
    path = tmp_path / "new" / "window.png"
    draw_window(inspect_window(window_of(700, 1300, 50), sp=sp), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_four_modes_are_drawn(tmp_path):
    draw_modes(tmp_path / "masks.png")
    draw_layouts(tmp_path / "layouts.png", window_tokens=2048, sp=4)
    assert (tmp_path / "layouts.png").stat().st_size > 10_000
    assert (tmp_path / "masks.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_format_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match=r"end it in \.png or \.svg"):
        draw_window(inspect_window(window_of(3)), tmp_path / "window.abc")
