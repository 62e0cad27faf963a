"""The window that ``anchorcontext inspect`` shows: an example, or a prepared one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from anchorcontext.errors import UserError

if TYPE_CHECKING:
    from anchorcontext.config import Config
    from anchorcontext.window import Window

COPY_NAME = "copy of the anchor"
EXAMPLE_SECTIONS = ("attention", "positions")
"""What an example window can be told beside its documents."""


def example_window(
    documents: str, overrides: Sequence[str], mode: str | None, sp: int
) -> tuple[Config, Window, Callable[[int], str]]:
    """Documents of the given lengths, behind an anchor where the mode has one, as overrides of
    ``attention`` and ``positions`` let them be seen; and what to call the window's runs.

    Raises:
        UserError: no lengths, another override, or one that breaks a rule of the config.
    """
    from anchorcontext.config import parse_config
    from anchorcontext.data.view import configured_view
    from anchorcontext.modes import get_mode
    from anchorcontext.window import Window

    lengths = _lengths(documents)
    for text in overrides:
        _check_override(text)
    if mode is not None:
        overrides = (*overrides, f"attention.mode={get_mode(mode).name}")
    config = parse_config(_example_values(sum(lengths), sp), overrides=overrides)
    token = config.attention.anchor.token
    if token is not None:
        raise UserError(
            f"attention.anchor.token={token!r} beside --documents: an example window has no tokens "
            "to replace; name a CONFIG with prepared windows"
        )
    view = configured_view(config)
    anchor = 0 if view.mode.has_anchor else None
    texts = [[0] * length for length in lengths]
    window = view.apply(Window.from_documents(texts, anchor, config.attention.mode))
    return config, window, lambda run: COPY_NAME if window.run_is_copy[run] else ""


def prepared_window(
    config: Config, split: str, index: int, mode: str | None
) -> tuple[Window, Callable[[int], str]]:
    """Window ``index`` of the config's prepared data, and what to call its runs."""
    import numpy as np

    from anchorcontext.data import View, WindowDataset, configured_view
    from anchorcontext.data.store import ANCHOR_DOCUMENT, COPY_START
    from anchorcontext.modes import get_mode

    dataset = WindowDataset(config.data.path, split)
    if not 0 <= index < len(dataset):
        raise UserError(
            f"--window {index}: {dataset.path} holds windows 0 to {len(dataset) - 1}; choose one"
        )
    record = dataset[index]
    # Under another mode than the config's its controls may have no meaning.
    view = configured_view(config, dataset) if mode is None else View(get_mode(mode))
    window = view.window(record)
    runs = np.arange(len(window.segment_docs))
    if view.anchor_copies:  # instead of the record's run 0
        copies = window.run_is_copy
        runs = np.where(copies, -1, np.cumsum(~copies))

    def name(run: int) -> str:
        if runs[run] < 0:
            return COPY_NAME
        row, start = int(record.documents[runs[run]]), int(record.starts[runs[run]])
        if row == ANCHOR_DOCUMENT:
            return "anchor"
        if start == COPY_START:
            return COPY_NAME
        document = dataset.document(row)
        cut = f" [{start:,}..]" if start else ""
        return f"{document.source}/{document.name}{cut}"

    return window, name


def _lengths(documents: str) -> list[int]:
    try:
        lengths = [int(length) for length in documents.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise UserError(
            f"--documents {documents!r}: give lengths of at least one token, as in 7,13,5"
        )
    return lengths


def _check_override(text: str) -> None:
    key = text.partition("=")[0].strip()
    if key.split(".")[0] not in EXAMPLE_SECTIONS:
        raise UserError(
            f"override {text!r} beside --documents: an example window takes overrides of "
            f"{' and '.join(EXAMPLE_SECTIONS)}; name a CONFIG instead of --documents for others"
        )


def _example_values(tokens: int, sp: int) -> dict[str, Any]:
    """A config whose sections are the schema's defaults where they matter to a window."""
    return {
        "run": {"name": "example"},
        "model": {"scratch": {"model_type": "llama"}},
        "data": {"path": "none", "tokenizer": "none", "window_tokens": tokens + 1},
        "parallel": {"sp": max(sp, 1)},
        "train": {"steps": 1, "windows_per_step": 1},
    }
