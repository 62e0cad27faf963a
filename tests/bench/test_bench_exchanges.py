"""The exchanges of a job against one device: right ones pass, wrong numbers and bytes are told."""

from itertools import product

import pytest
import torch

from anchorcontext.bench.exchanges import EXCHANGES, HEADERS, Settings, measure, table_row
from anchorcontext.errors import UserError
from anchorcontext.parallel import build_mesh
from anchorcontext.testing import run_distributed
from anchorcontext.train.control import Control

SMALL = Settings(tokens=192, heads=(4, 2), head_dim=8, repeats=1, modes=("anchor",))


def measured(rank, world_size, spoil=None):
    from anchorcontext.bench import exchanges

    attend = exchanges.distributed_attention

    def spoiled(q, k, v, plan):
        out = attend(q, k, v, plan)
        if plan.group is None and spoil == "one device":
            return out * torch.nan
        if plan.group is None or rank != 1:
            return out
        if spoil == "bytes":
            plan.meter.bytes_sent += 1
        return out * torch.nan if spoil == "numbers" else out

    exchanges.distributed_attention = spoiled
    found = measure(SMALL, build_mesh(world_size), Control.create(), torch.device("cpu"))
    return list(found)


def test_all_exchanges_and_layouts_are_measured_and_right():
    found = run_distributed(measured, 4)
    assert all(results == found[0] for results in found)
    cases = [(result.layout, result.exchange) for result in found[0]]
    assert cases == [
        *product(("contiguous",), EXCHANGES),
        *product(("zigzag", "balanced"), ("ring", "gather", "hybrid")),
    ]
    for result in found[0]:
        assert result.passed and result.error < 1e-5 and result.bytes_sent > 0
        assert 0 < result.seconds_exposed < result.seconds
        assert len(table_row(result)) == len(HEADERS) and table_row(result)[-1] == ""


@pytest.mark.parametrize(
    ("spoil", "said"),
    [("numbers", "WRONG"), ("one device", "WRONG"), ("bytes", "WRONG BYTES")],
)
def test_what_one_rank_does_wrong_is_told(spoil, said):
    for results in run_distributed(measured, 2, spoil):
        assert not any(result.passed for result in results)
        assert {table_row(result)[-1] for result in results} == {said}


def test_one_rank_has_nobody_to_exchange_with():
    with pytest.raises(UserError, match=r"start it with RANKS=2 launch/torchrun.sh"):
        next(measure(SMALL, build_mesh(1), Control.create(), torch.device("cpu")))
