"""How a run sees prepared windows: the config's mode with its controls, and the anchor's token.

Windows are prepared once; what an experiment varies (docs/controls.md) is applied when they are
read, so that runs with and without a control train on the same documents in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import UserError
from ..modes import MODES, Mode, with_controls
from ..window import Window
from .store import WindowDataset, WindowRecord
from .tokenizer import load_tokenizer

if TYPE_CHECKING:
    from ..config import Config


@dataclass(frozen=True)
class View:
    """What makes a window of a prepared record."""

    mode: Mode = MODES["anchor"]
    boundary: str = "mask"
    """As of :class:`~anchorcontext.window.Window`."""
    anchor_token: int | None = None
    """Stands in the place of the anchor and of its copies; None: what was prepared."""
    anchor_copies: bool = False
    """Documents get a copy of the anchor each, in place of one that all of them see."""

    def __str__(self) -> str:
        """The mode with what is varied of it."""
        return f"{self.mode}, copied to every document" if self.anchor_copies else str(self.mode)

    def window(self, record: WindowRecord) -> Window:
        """The window of a prepared record.

        Raises:
            UserError: it has no anchor, and the mode needs one.
        """
        return self._copied(record.window(self.mode, self.boundary, self.anchor_token))

    def apply(self, window: Window) -> Window:
        """A window to plan with, seen alike: its tokens, the anchor's included, and boundary stay.

        Raises:
            UserError: as :meth:`window`.
        """
        return self._copied(window.with_mode(self.mode))

    def _copied(self, window: Window) -> Window:
        return window.with_anchor_copies() if self.anchor_copies else window


def configured_view(config: Config, dataset: WindowDataset | None = None) -> View:
    """The view that ``attention``, ``positions`` and ``loss.boundary`` of a config describe.

    Args:
        dataset: the prepared windows; without them the anchor's token stays what it is.

    Raises:
        UserError: ``attention.anchor.token`` is no token of the windows' tokenizer.
    """
    anchor, positions = config.attention.anchor, config.positions
    mode = with_controls(
        config.attention.mode,
        anchor_visible=anchor.visible,
        anchor_position=anchor.position,
        reset_positions=anchor.reset_positions,
        clamp_first=positions.clamp_first,
        offset=positions.offset,
    )
    token = None if dataset is None else _token_id(anchor.token, dataset)
    return View(mode, config.loss.boundary, token, anchor.copies)


def _token_id(token: str | int | None, dataset: WindowDataset) -> int | None:
    if isinstance(token, int) and token >= dataset.vocab_size:
        raise UserError(
            f"attention.anchor.token = {token}: the tokenizer of {dataset.path} has the ids 0 to "
            f"{dataset.vocab_size - 1}; choose one of them"
        )
    if not isinstance(token, str):
        return token
    found = getattr(load_tokenizer(dataset.tokenizer_path), f"{token}_token_id")
    if found is None:
        raise UserError(
            f"attention.anchor.token = {token!r}: the tokenizer of {dataset.path} has no "
            f"{token.upper()}; give the id of another token"
        )
    return int(found)
