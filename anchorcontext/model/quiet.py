"""transformers' progress bars, silenced: one a rank and a file would bury what matters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as hf_logging


@contextmanager
def quiet_progress() -> Iterator[None]:
    """Without the progress bars of transformers; they come back if they were on."""
    enabled = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            hf_logging.enable_progress_bar()
