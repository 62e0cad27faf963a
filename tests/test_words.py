"""Numbers and times in sentences."""

from anchorcontext.words import counted, duration, time_left


def test_one_is_singular_and_thousands_are_set_apart():
    numbers = [counted(number, "window") for number in (0, 1, 65536)]
    assert numbers == ["0 windows", "1 window", "65,536 windows"]
    assert counted(2, "micro-batch", "micro-batches") == "2 micro-batches"


def test_times_are_hours_minutes_and_seconds():
    assert [duration(seconds) for seconds in (None, 59.6, 7384)] == ["-", "0:01:00", "2:03:04"]
    assert time_left(60.0, done=2.0, total=5.0) == "about 0:01:30 left"
