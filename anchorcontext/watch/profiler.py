"""A few steps under torch's profiler, written as Chrome traces into the run's folder.

Open a trace in ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.profiler import profile

    from ..config.sections import ProfileSection

logger = logging.getLogger(__name__)

FOLDER = "profile"


class StepProfiler:
    """Records the steps ``from .. from + steps - 1``; outside them it costs one comparison.

    The trace is written after the window's last step, outside any step's time. A run that is
    stopped inside the window leaves what it has; one that resumes inside it records the rest.
    Training goes on when a trace cannot be made or written.

    Args:
        section: ``watch.profile``; None never profiles.
        run_dir: traces go to its folder ``profile``.
        rank: rank 0 profiles, with ``ranks: all`` the others too.
        device: whose kernels are recorded beside the host's operators.
        written: called with the last step recorded and the trace's path.
    """

    def __init__(
        self,
        section: ProfileSection | None,
        run_dir: str | Path,
        *,
        rank: int,
        device: torch.device | str = "cpu",
        written: Callable[[int, Path], None] | None = None,
    ) -> None:
        mine = section is not None and (rank == 0 or section.ranks == "all")
        first = section.first if section is not None and mine else 0
        self._window = range(first, first + section.steps) if section and mine else range(0)
        self._folder, self._rank = Path(run_dir) / FOLDER, rank
        self._device, self._written = torch.device(device), written
        self._running: profile | None = None
        self._recorded: list[int] = []

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Run one step; ``step`` counts from 1."""
        if step not in self._window or not self._start():
            yield
            return
        with torch.profiler.record_function(f"step {step}"):
            yield
        self._recorded.append(step)
        if step == self._window[-1]:
            self.close()

    def close(self) -> None:
        """Write what was recorded so far, if anything was."""
        running, recorded = self._running, self._recorded
        self._running, self._recorded = None, []
        if running is None:
            return
        try:
            running.stop()
            if not recorded:
                return
            path = self._path(recorded)
            path.parent.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            logger.warning("no trace was written: %s: %s", type(error).__name__, error)
            return
        logger.info("steps %d to %d are profiled in %s", recorded[0], recorded[-1], path)
        if self._written is not None:
            self._written(recorded[-1], path)

    def _start(self) -> bool:
        """Whether the profiler runs."""
        if self._running is not None:
            return True
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        try:
            running = profile(activities=activities)
            running.start()
        except RuntimeError as error:
            logger.warning("the profiler does not start: %s", error)
            self._window = range(0)
            return False
        self._running = running
        return True

    def _path(self, recorded: list[int]) -> Path:
        steps = f"steps-{recorded[0]:06d}-{recorded[-1]:06d}"
        return self._folder / f"{steps}-rank-{self._rank:05d}.json.gz"
