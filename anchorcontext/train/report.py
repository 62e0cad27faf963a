"""What a training run leaves behind, for the closing table and for ``--json``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..watch.metrics import StepRecord


@dataclass
class TrainReport:
    """A run so far; the numbers are of the steps of this process, not of those before a resume."""

    run_dir: Path
    world_size: int
    dp: int
    sp: int
    first_step: int
    """Steps done when the process started; 0 for a new run."""
    step: int
    """Steps done."""
    first_loss: float | None = None
    last_loss: float | None = None
    num_skipped: int = 0
    """Steps that were not applied."""
    tokens: int = 0
    seconds: float = 0.0
    """In steps; evaluation, parity checks and saving come on top."""
    seconds_saving: float = 0.0
    """Training time lost to checkpoints."""
    tokens_per_second: float = 0.0
    """Of the whole job, over the time of the steps alone."""
    bytes_sent: int = 0
    """All ranks."""
    peak_memory_bytes: int = 0
    """Of the rank that used most."""
    largest_logit_difference: float | None = None
    """Over all parity checks; None when none ran."""
    parity_checks: int = 0
    checkpoint: Path | None = None
    """The newest one: written, or else the one that was resumed from."""
    failed_saves: int = 0
    """Checkpoints that could not be written."""
    stopped_by: str | None = None
    """The signal that ended the run before its last step; None for a run that is done."""

    def add(self, record: StepRecord) -> None:
        """Count one step."""
        self.step = record.step
        if record.loss is not None:
            self.first_loss = record.loss if self.first_loss is None else self.first_loss
            self.last_loss = record.loss
        self.num_skipped += record.skipped
        self.tokens += record.tokens
        self.seconds += record.seconds
        self.tokens_per_second = self.tokens / self.seconds if self.seconds else 0.0
        self.bytes_sent += record.bytes_sent
        self.peak_memory_bytes = max(self.peak_memory_bytes, record.peak_memory_bytes)

    def add_parity(self, largest_difference: float) -> None:
        """Count one parity check."""
        self.parity_checks += 1
        before = self.largest_logit_difference or 0.0
        self.largest_logit_difference = max(before, largest_difference)
