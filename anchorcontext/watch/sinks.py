"""Where a run's records and events go: the metrics file, the console, wandb, TensorBoard."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from .console import ConsoleSink
from .jsonl import JsonlSink
from .metrics import StepRecord
from .trackers import TensorBoardSink, WandbSink

if TYPE_CHECKING:
    from ..config import Config

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


class Sink(Protocol):
    """One place that records and events are written to."""

    def log(self, record: StepRecord) -> None: ...

    def event(self, name: str, **values: Any) -> None: ...

    def evaluation(self, step: int, values: Mapping[str, float], seconds: float) -> None: ...

    def close(self) -> None: ...


class Sinks:
    """All sinks of this process. A sink that fails never stops the run: it is reported once.

    Optional sinks are dropped at their first failure; ``required`` ones (the metrics file) are
    tried again every time, since a full disk may have room later.
    """

    def __init__(self, optional: Sequence[Sink] = (), required: Sequence[Sink] = ()) -> None:
        self._required = list(required)
        self._optional = list(optional)
        self._reported: set[int] = set()

    def log(self, record: StepRecord) -> None:
        """Write one step's record everywhere."""
        self._each(lambda sink: sink.log(record))

    def event(self, name: str, **values: Any) -> None:
        """Write an event (a save, a resume, a parity check) with its values everywhere."""
        self._each(lambda sink: sink.event(name, **values))

    def evaluation(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        """Write what was measured on the weights after ``step`` steps, by name, everywhere."""
        self._each(lambda sink: sink.evaluation(step, values, seconds))

    def close(self) -> None:
        """Close every sink."""
        self._each(lambda sink: sink.close())
        self._required, self._optional = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _each(self, write: Callable[[Sink], None]) -> None:
        for sink in [*self._required, *self._optional]:
            try:
                write(sink)
            except Exception as error:
                if id(sink) not in self._reported:
                    _report(type(sink).__name__, error)
                    self._reported.add(id(sink))
                if sink in self._optional:
                    self._optional.remove(sink)


def build_sinks(
    config: Config,
    run_dir: str | Path,
    *,
    rank: int,
    total_steps: int,
    start_step: int = 0,
    made_by: Mapping[str, Any] | None = None,
) -> Sinks:
    """The sinks that the ``watch`` section asks for. Only rank 0 gets any.

    Args:
        config: the resolved configuration.
        run_dir: the run folder.
        total_steps: optimiser steps of the whole run.
        start_step: steps done in the checkpoint the run starts from; 0 for a new run.
        made_by: ``commit`` and ``versions``, for trackers.
    """
    if rank != 0:
        return Sinks()
    run_dir = Path(run_dir)
    watch = config.watch
    required = [_opened(lambda: JsonlSink(run_dir / METRICS_FILE, start_step))]
    optional = []
    if watch.progress:
        optional.append(_opened(lambda: ConsoleSink(total_steps, start_step)))
    if watch.tensorboard:
        optional.append(_opened(lambda: TensorBoardSink(run_dir / "tensorboard", start_step)))
    if watch.wandb is not None:
        optional.append(_opened(lambda: _wandb(config, run_dir, made_by or {})))
    return Sinks(
        [sink for sink in optional if sink is not None],
        [sink for sink in required if sink is not None],
    )


def _wandb(config: Config, run_dir: Path, made_by: Mapping[str, Any]) -> Sink:
    given = config.watch.wandb
    assert given is not None
    return WandbSink(
        run_dir,
        name=config.run.name,
        config={**config.model_dump(mode="json"), "made_by": dict(made_by)},
        commit=made_by.get("commit"),
        project=given.project,
        entity=given.entity,
        mode=None if given.mode == "auto" else given.mode,
    )


def _opened(build: Callable[[], Sink]) -> Sink | None:
    try:
        return build()
    except Exception as error:
        _report("a sink", error)
        return None


def _report(name: str, error: Exception) -> None:
    logger.warning(
        "%s failed, training goes on without it: %s: %s", name, type(error).__name__, error
    )
