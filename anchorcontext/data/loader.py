"""Which windows a rank trains on, in which order; knows nothing of torch.distributed.

The stream of windows is endless and the same for everybody: epoch after epoch, each a permutation
of the dataset that is a function of (seed, epoch) alone. *Global window* ``n`` is the n-th of that
stream. A round hands ``dp_size x micro_batch_windows`` consecutive global windows to the data
parallel ranks; a step is one or more rounds, so the windows of a step depend neither on dp, nor on
sp, nor on accumulation, and a position is one integer that means the same in every arrangement.

::

    position p         dp rank 0      dp rank 1                     (micro_batch_windows = 2)
    round 0       p    p+0  p+1       p+2  p+3
    round 1     p+4    p+4  p+5       p+6  p+7
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import UserError
from ..window import Window
from .draws import splitmix64
from .prefetch import Prefetch
from .store import WindowDataset
from .view import View


def epoch_order(num_windows: int, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """The window indices of one epoch in order, int64 (num_windows,).

    Indices are sorted by a hash of (seed, epoch, index): SplitMix64 (Steele, Lea, Flood, OOPSLA
    2014), written out, because NumPy may change the streams of its generators between versions and
    a resumed run must not.
    """
    index = np.arange(num_windows, dtype=np.uint64)
    if not shuffle:
        return index.astype(np.int64)
    key = splitmix64(np.array([seed % (1 << 64)], dtype=np.uint64))
    key = splitmix64(key + np.uint64(epoch))
    return np.argsort(splitmix64(key + index), kind="stable").astype(np.int64)


class Loader:
    """An endless iterator over the micro-batches of one data-parallel rank.

    Each item is a list of ``micro_batch_windows`` windows. All ranks of an SP group pass the same
    ``dp_rank`` and so get the same windows.

    Args:
        dataset: the prepared windows.
        view: what makes a window of a prepared one.
        dp_rank, dp_size: the place in the data-parallel dimension of the mesh.
        micro_batch_windows: windows of one rank in one round.
        seed, shuffle: decide the order; ``shuffle=False`` is the order of packing, every epoch.

    Raises:
        UserError: the dataset is empty, or has no anchor and the view's mode needs one.
    """

    def __init__(
        self,
        dataset: WindowDataset,
        *,
        view: View | None = None,
        dp_rank: int = 0,
        dp_size: int = 1,
        micro_batch_windows: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        if not 0 <= dp_rank < dp_size:
            raise UserError(f"dp_rank = {dp_rank}: must lie in 0 .. {dp_size - 1} (dp_size - 1)")
        if micro_batch_windows < 1:
            raise UserError(f"micro_batch_windows = {micro_batch_windows}: at least 1")
        if len(dataset) == 0:
            raise UserError(f"data.path = {str(dataset.path)!r} holds no windows")
        self.view = view or View()
        if self.view.mode.has_anchor and dataset.anchor_id is None:
            raise UserError(
                f"attention.mode = {self.view.mode.name!r} needs windows with an anchor, and "
                f"{dataset.path} was prepared with data.anchor=none; prepare it with "
                "data.anchor=auto"
            )
        self.dataset = dataset
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.micro_batch_windows = micro_batch_windows
        self.seed, self.shuffle = seed, shuffle
        self.position = 0
        """Global windows handed out so far, over all ranks."""
        self.last_ids: list[int] = []
        """Dataset indices of the windows handed out last."""
        self._order: tuple[int, np.ndarray] | None = None
        self._ahead: list[int] = []
        self._prepare: Callable[[list[Window]], object] | None = None
        self._prefetch = Prefetch(self._micro_batch)

    def prefetch(self, count: int, prepare: Callable[[list[Window]], object] | None = None) -> None:
        """Read the ``count`` micro-batches after each one that is handed out in the background.

        ``prepare`` is called with the windows there, before they are handed out: to plan them. What
        it, or reading, raises comes out of ``next``. The stream and its state stay the same.
        """
        self._prepare = prepare
        self._ahead = [round_ * self.windows_per_round for round_ in range(1, count + 1)]

    def close(self) -> None:
        """End the background thread; the loader goes on without one."""
        self._ahead = []
        self._prefetch.close()

    @property
    def epoch(self) -> int:
        """The epoch of the next global window."""
        return self.position // len(self.dataset)

    @property
    def windows_per_round(self) -> int:
        """Global windows that one ``next`` on every rank hands out together."""
        return self.dp_size * self.micro_batch_windows

    def window_ids(self, position: int, count: int) -> list[int]:
        """Dataset indices of the global windows ``position`` to ``position + count - 1``."""
        return [self._window_id(n) for n in range(position, position + count)]

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> list[Window]:
        if self._ahead:
            following = [self.position + step for step in self._ahead]
            ids, windows = self._prefetch.get(self.position, following)
        else:
            ids, windows = self._micro_batch(self.position)
        self.position += self.windows_per_round
        self.last_ids = ids
        return windows

    def _micro_batch(self, position: int) -> tuple[list[int], list[Window]]:
        """This rank's share of the round at ``position``: a function of the position alone."""
        first = position + self.dp_rank * self.micro_batch_windows
        ids = self.window_ids(first, self.micro_batch_windows)
        windows = [self.view.window(self.dataset[index]) for index in ids]
        if self._prepare is not None:
            self._prepare(windows)
        return ids, windows

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands; equal on all ranks, independent of dp, sp and accumulation."""
        return {
            "position": self.position,
            "epoch": self.epoch,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": self.dataset.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the first window that the saved run had not handed out.

        Raises:
            UserError: the state is of other windows or of another order, so that "the next unseen
                window" has no meaning.
        """
        rules = {
            "fingerprint": (self.dataset.fingerprint, "point data.path to the windows it was on"),
            "seed": (self.seed, "use the seed of the saved run"),
            "shuffle": (self.shuffle, "use the data.shuffle of the saved run"),
        }
        for key, (ours, fix) in rules.items():
            if state[key] != ours:
                raise UserError(
                    f"the data position was saved with {key} {state[key]!r}, this run has "
                    f"{ours!r}: the order of windows differs; {fix}, or start a new run"
                )
        self.position = int(state["position"])
        self.last_ids = []

    def _window_id(self, n: int) -> int:
        epoch, place = divmod(n, len(self.dataset))
        order = self._order  # the other thread may be in another epoch
        if order is None or order[0] != epoch:
            order = epoch, epoch_order(len(self.dataset), self.seed, epoch, self.shuffle)
            self._order = order
        return int(order[1][place])
