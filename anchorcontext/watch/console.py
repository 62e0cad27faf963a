"""What the person at the terminal sees: a progress bar, or plain lines in a log file."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, TextIO

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from ..words import duration
from .metrics import StepRecord

_RECENT_STEPS = 20


class ConsoleSink:
    """States step, loss, tokens/s and the time that is left.

    On a terminal it draws one bar and lets log messages scroll above it; elsewhere (a batch
    system's log file, a pipe) it writes one line a record.

    Args:
        total_steps: optimiser steps of the whole run.
        start_step: steps done before this process.
        stream: where to write; standard error by default.
    """

    def __init__(self, total_steps: int, start_step: int = 0, stream: TextIO | None = None) -> None:
        self.total_steps = total_steps
        self._stream = stream or sys.stderr
        self._marks = deque([(start_step, time.monotonic())], maxlen=_RECENT_STEPS + 1)
        self._open = ExitStack()
        self._bar: tqdm | None = None
        if self._stream.isatty():
            self._bar = tqdm(
                total=total_steps,
                initial=start_step,
                file=self._stream,
                dynamic_ncols=True,
                bar_format="step {n_fmt}/{total_fmt} |{bar}| {desc}",
            )
            self._open.callback(self._bar.close)
            self._open.enter_context(logging_redirect_tqdm())

    def log(self, record: StepRecord) -> None:
        """Show one record."""
        self._marks.append((record.step, time.monotonic()))
        text = f"{describe(record)}  left {duration(self.seconds_left())}"
        if self._bar is None:
            self._stream.write(f"step {record.step}/{self.total_steps}  {text}\n")
            self._stream.flush()
            return
        self._bar.set_description_str(text, refresh=False)
        self._bar.update(record.step - self._bar.n)
        self._bar.refresh()

    def event(self, name: str, **values: Any) -> None:
        """Show one event as a line; mappings (versions, say) are for the files."""
        told = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
        self._say("  ".join([name, *(f"{key} {value}" for key, value in told.items())]))

    def evaluation(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        """Show what was measured as a line."""
        told = [f"{name} {value:.4g}" for name, value in values.items()]
        self._say("  ".join([f"evaluation  step {step}", *told, f"({seconds:.1f} s)"]))

    def _say(self, text: str) -> None:
        if self._bar is None:
            self._stream.write(text + "\n")
            self._stream.flush()
        else:
            self._bar.write(text, file=self._stream)

    def seconds_left(self) -> float | None:
        """At the pace of the last steps; None before the first."""
        (first, started), (last, now) = self._marks[0], self._marks[-1]
        if last <= first:
            return None
        return (now - started) / (last - first) * (self.total_steps - last)

    def close(self) -> None:
        """Finish the bar and give the log handlers back."""
        self._open.close()
        self._bar = None


def describe(record: StepRecord) -> str:
    """One record in a line: loss, learning rate, gradient norm, speed and utilisation."""
    if record.skipped:
        parts = [f"skipped ({record.skip_reason})"]
    else:
        parts = ["loss -" if record.loss is None else f"loss {record.loss:.4f}"]
        if record.grad_norm is not None:
            parts.append(f"grad {record.grad_norm:.3g}")
    parts += [f"lr {record.lr:.2e}", f"{_short(record.tokens_per_second)} tokens/s"]
    if record.mfu is not None:
        parts.append(f"MFU {record.mfu:.1%}")
    return "  ".join(parts)


def _short(number: float) -> str:
    """Three digits and a unit prefix: 12345 becomes 12.3k."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"
