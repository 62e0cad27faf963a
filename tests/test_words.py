"""Numbers in sentences."""

from anchorcontext.words import counted


def test_one_is_singular_and_thousands_are_set_apart():
    numbers = [counted(number, "window") for number in (0, 1, 65536)]
    assert numbers == ["0 windows", "1 window", "65,536 windows"]
    assert counted(2, "micro-batch", "micro-batches") == "2 micro-batches"
