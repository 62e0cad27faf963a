"""What happens when a step goes wrong: not finite, a spike, nothing to learn from.

Losses and norms are those of the whole batch, so every rank decides alike without asking.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.sections import GuardsSection, SpikeSection
from ..data import WindowDataset
from ..errors import UserError
from ..watch.jsonl import json_values
from ..watch.metrics import StepRecord
from .step import NO_TARGETS, NOT_FINITE, SPIKES, StepLimits

logger = logging.getLogger(__name__)

FEWEST_STEPS = 8
"""Steps before a median says anything."""


class DivergedError(RuntimeError):
    """The run is lost without a change; raised on every rank alike, with nothing saved after it."""


@dataclass(frozen=True)
class Finding:
    """Something about a step that a person should see."""

    name: str
    """Of the event."""
    text: str
    stops: bool = False


class Guards:
    """Judges step after step.

    Args:
        section: the rules.
        num_windows: windows of the dataset; when as many in a row have no target, none has one.
    """

    def __init__(self, section: GuardsSection, num_windows: int) -> None:
        self.section, self.num_windows = section, num_windows
        self._losses: deque[float] = deque(maxlen=section.recent)
        self._norms: deque[float] = deque(maxlen=section.recent)
        self._broken = 0
        self._without_targets = 0

    @property
    def limits(self) -> StepLimits:
        """What the next step must not exceed to be applied."""
        return StepLimits(
            loss=_limit(self.section.loss_spike, self._losses, "skip"),
            grad_norm=_limit(self.section.gradient_spike, self._norms, "skip"),
        )

    @property
    def healthy(self) -> bool:
        """Whether the last step was finite; if it was not, the weights may be what is broken."""
        return self._broken == 0

    def judge(self, record: StepRecord) -> list[Finding]:
        """What is wrong with a step; it becomes part of the history.

        Raises:
            UserError: no window of the dataset has a valid target.
        """
        if record.skip_reason == NO_TARGETS:
            self._count_without_targets(record)
            return []
        self._without_targets = 0
        finite = record.skip_reason != NOT_FINITE and record.loss is not None
        if not finite or not math.isfinite(record.loss or 0.0):
            self._broken += 1
            return [self._not_finite(record)]
        self._broken = 0
        findings = [
            *self._spike("loss", record, record.loss, self.section.loss_spike, self._losses),
            *self._spike(
                "gradient norm", record, record.grad_norm, self.section.gradient_spike, self._norms
            ),
        ]
        if record.skip_reason not in SPIKES:
            # A spike that was applied is the new normal soon enough; one that was not is none.
            self._losses.append(record.loss or 0.0)
            if record.grad_norm is not None:
                self._norms.append(record.grad_norm)
        return findings

    def state_dict(self) -> dict[str, Any]:
        """The history: a resumed run must judge as the undisturbed one."""
        return {
            "losses": list(self._losses),
            "norms": list(self._norms),
            "broken": self._broken,
            "without_targets": self._without_targets,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the history of a checkpoint."""
        self._losses.extend(state["losses"])
        self._norms.extend(state["norms"])
        self._broken, self._without_targets = state["broken"], state["without_targets"]

    def _not_finite(self, record: StepRecord) -> Finding:
        allowed = self.section.max_skipped
        what = f"loss {record.loss}, gradient norm {record.grad_norm}"
        text = (
            f"step {record.step}: not finite ({what}), windows {list(record.windows)}; the step "
            f"was not applied, {self._broken} in a row"
        )
        return Finding("not_finite", text, stops=self._broken >= allowed)

    def _spike(
        self,
        what: str,
        record: StepRecord,
        value: float | None,
        rule: SpikeSection | None,
        history: deque[float],
    ) -> list[Finding]:
        limit = _limit(rule, history)
        if rule is None or limit is None or value is None or value <= limit:
            return []
        applied = "was not applied" if record.skipped else "was applied"
        text = (
            f"step {record.step}: {what} {value:.4g} is over {rule.factor:g} times the median of "
            f"{len(history)} steps, {limit / rule.factor:.4g}; windows {list(record.windows)}; the "
            f"step {applied}"
        )
        return [Finding(f"{what.split()[0]}_spike", text, stops=rule.action == "stop")]

    def _count_without_targets(self, record: StepRecord) -> None:
        self._without_targets += len(record.windows)
        if self._without_targets >= self.num_windows:
            raise UserError(
                f"{self._without_targets} windows in a row have no valid target, which is all "
                f"{self.num_windows} of data.path: there is nothing to learn; check loss.boundary "
                "(documents of one token have no target) and how the windows were prepared"
            )


def dump_step(
    folder: Path, record: StepRecord, finding: Finding, dataset: WindowDataset, position: int
) -> None:
    """Write what a step was made of into ``folder``, to replay it; what prevents it is only logged.

    Args:
        position: global windows handed out before the step, as in the loader's state.
    """
    file = folder / f"step-{record.step:06d}-{finding.name}.json"
    try:
        values = {
            "event": finding.name,
            "text": finding.text,
            "position": position,
            "dataset": str(dataset.path),
            "fingerprint": dataset.fingerprint,
            "record": record.as_dict(),
            "windows": [{"window": w, "documents": _documents(dataset, w)} for w in record.windows],
        }
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(json_values(values), indent=2) + "\n")
    except (OSError, UserError) as error:
        logger.warning("%s cannot be written: %s", file, error)


def _documents(dataset: WindowDataset, window: int) -> list[dict[str, Any]]:
    """Which tokens of which documents a window holds; the anchor is none."""
    record = dataset[window]
    lengths = record.cu_seqlens[1:] - record.cu_seqlens[:-1]
    segments = zip(record.documents, record.starts, lengths, strict=True)
    found = []
    for document, start, length in segments:
        if document >= 0:
            info = dataset.document(int(document))
            found.append(
                {
                    "document": int(document),
                    "source": info.source,
                    "name": info.name,
                    "from_token": int(start),
                    "tokens": int(length),
                }
            )
    return found


def _limit(
    rule: SpikeSection | None, history: deque[float], action: str | None = None
) -> float | None:
    """The value from which on a step is a spike; None where that is not known or not asked for."""
    if rule is None or len(history) < FEWEST_STEPS or action not in (None, rule.action):
        return None
    return rule.factor * statistics.median(history)
