"""Ranks agree on errors, counts and values."""

import pytest

from anchorcontext.errors import UserError
from anchorcontext.testing import run_distributed
from anchorcontext.train.control import Control, RankError


def outcomes(rank, world_size):
    control = Control.create()
    raised = []
    for failing in (None, UserError("bad key"), OSError("no such file")):
        try:
            with control.together("reading"):
                if failing is not None and rank == 1:
                    raise failing
            raised.append(None)
        except Exception as error:
            raised.append((type(error).__name__, str(error)))
    try:
        with control.together("reading"):
            raise UserError("shared mistake")
    except UserError as error:
        raised.append((type(error).__name__, str(error)))
    return raised, control.sum([rank, 1]), control.from_first(rank), control.gather(rank * 2)


def test_an_error_of_one_rank_is_raised_on_all():
    first, second, third = run_distributed(outcomes, 3)
    for raised, total, from_first, gathered in (first, second, third):
        assert raised[0] is None
        assert raised[1] == ("UserError", "rank 1: bad key")
        assert raised[3] == ("UserError", "shared mistake")
        assert (total, from_first, gathered) == ([3, 3], 0, [0, 2, 4])
    assert second[0][2] == ("OSError", "no such file")
    assert first[0][2] == third[0][2]
    assert first[0][2][0] == RankError.__name__
    assert "rank 1 failed while reading: OSError: no such file" in first[0][2][1]


def test_a_world_of_one_raises_its_own_error():
    control = Control.create()
    with pytest.raises(KeyError), control.together("reading"):
        raise KeyError("x")
    assert control.gather("a") == ["a"]
