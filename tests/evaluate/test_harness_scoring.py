"""RULER's scores: exact values by hand, and what the harness would have made of them."""

import pytest

from anchorcontext.errors import UserError
from anchorcontext.evaluate.harness.scoring import string_match_all, string_match_part

PREDICTIONS = ["The numbers are 123 and 456.", "none", "KEY-789"]
REFERENCES = [["123", "456", "789"], ["42"], ["key-789"]]


def test_all_match_is_the_mean_share_of_references_found():
    # (2/3 + 0 + 1) / 3
    assert string_match_all(PREDICTIONS, REFERENCES) == pytest.approx(55.56, abs=0.005)


def test_part_match_asks_for_any_reference():
    # Two of three answers hold one: RULER's 66.67, where the shares' best would give 33.33.
    assert string_match_part(PREDICTIONS, REFERENCES) == pytest.approx(66.67, abs=0.005)


def test_one_spelling_of_an_answer_suffices():
    assert string_match_part(["in 1066"], [["1066", "the year 1066", "AD 1066"]]) == 100


@pytest.mark.parametrize("score", [string_match_all, string_match_part])
@pytest.mark.parametrize(
    ("predictions", "references"),
    [
        (["a"], ["a"]),  # would be matched letter by letter
        ("a", [["a"]]),
        (["a"], "a"),
        (["a"], [[]]),
        (["a", "b"], [["a"]]),
        ([], []),
    ],
)
def test_what_is_no_list_of_references_is_refused(score, predictions, references):
    with pytest.raises(UserError, match=r"list|as many"):
        score(predictions, references)
