"""Fingerprints of weights on disk."""

import pytest

from anchorcontext.weights import folder_digest


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(3_000_000))
    return tmp_path


def test_the_same_weights_have_the_same_fingerprint_whatever_lies_beside(folder):
    before = folder_digest(folder)
    (folder / "README.md").write_text("a card")
    assert folder_digest(str(folder)) == before


@pytest.mark.parametrize("place", [0, 1_500_000, 2_999_999])
def test_another_byte_of_the_weights_is_another_fingerprint(folder, place):
    before = folder_digest(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(place)
        file.write(b"\1")
    assert folder_digest(folder) != before


def test_so_is_another_config_another_name_or_another_file(folder):
    found = {folder_digest(folder)}
    (folder / "config.json").write_text('{"rope_theta": 5e6}')
    found.add(folder_digest(folder))
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    found.add(folder_digest(folder))
    (folder / "more.bin").write_bytes(b"")
    found.add(folder_digest(folder))
    assert len(found) == 4
