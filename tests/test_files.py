"""A file is replaced whole, or stays as it was."""

import pytest

from anchorcontext.files import written_whole


def test_a_file_appears_when_it_is_whole(tmp_path):
    path = tmp_path / "made" / "a.json"
    with written_whole(path) as beside:
        beside.write_text("one")
        assert not path.exists()
    assert path.read_text() == "one" and list(path.parent.iterdir()) == [path]


def test_an_error_leaves_the_old_file_and_nothing_beside(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), written_whole(path) as beside:
        beside.write_text("ne")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
