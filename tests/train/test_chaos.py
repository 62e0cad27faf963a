"""The short form of ``make chaos``: eight faults of different kinds, in a drawn order."""

import importlib
from pathlib import Path


def test_a_run_survives_what_befalls_it_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)  # the ranks import the script by its name
    chaos = importlib.import_module("chaos")
    struck = chaos.chaos(tmp_path, faults=8, seed=3)
    assert len({fault.kind for fault in struck}) >= 6
