"""Experiment trackers: Weights & Biases and TensorBoard, both optional."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from ..files import written_whole
from .metrics import StepRecord
from .redact import redact

logger = logging.getLogger(__name__)

_NETWORK_TIMEOUT_SECONDS = 3.0
_INIT_TIMEOUT_SECONDS = 30.0
_FINISH_TIMEOUT_SECONDS = 120.0

EVALUATION = "evaluation"
"""In front of the names of what is measured between steps."""

Mode = Literal["online", "offline", "disabled", "shared"]


class WandbSink:
    """Logs to Weights & Biases; offline when there is no network or no API key.

    ``wandb.json`` in the run folder keeps the run's id and the last step logged, so that a resumed
    process goes on with the same run and one step axis: a step that wandb has already (it ran
    after the checkpoint that was resumed from) is not logged again.

    Args:
        run_dir: the run folder.
        name: the run's name.
        config: the resolved configuration; secrets are taken out here.
        commit: of the code; shown as the run's commit.
        project, entity, mode: as in ``wandb.init``; ``mode`` None chooses online or offline.

    Raises:
        ImportError: wandb is not installed.
        Exception: whatever ``wandb.init`` raises, offline too.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        name: str,
        config: dict[str, Any],
        commit: str | None = None,
        project: str | None = None,
        entity: str | None = None,
        mode: Mode | None = None,
    ) -> None:
        import wandb

        self._state_path = Path(run_dir) / "wandb.json"
        self._state = _read_state(self._state_path)
        arguments: dict[str, Any] = {
            "dir": str(run_dir),
            "id": self._state["id"],
            "name": name,
            "project": project or "anchorcontext",
            "entity": entity,
            "config": redact(config),
            "resume": "allow",
            "save_code": False,
            # wandb's own metadata hold the command line and the remote's URL, secrets included.
            "settings": wandb.Settings(
                x_disable_meta=True,
                disable_git=True,
                disable_job_creation=True,
                git_commit=commit,
                silent=True,
                console="off",
                init_timeout=_INIT_TIMEOUT_SECONDS,
                finish_timeout=_FINISH_TIMEOUT_SECONDS,
            ),
        }
        chosen: Any = mode or os.environ.get("WANDB_MODE") or _reachable_mode(wandb)
        try:
            self._run = wandb.init(mode=chosen, **arguments)
        except Exception as error:
            if chosen == "offline":
                raise
            logger.warning("wandb is offline: %s: %s", type(error).__name__, error)
            self._run = wandb.init(mode="offline", **arguments)
        self._save_state()

    def log(self, record: StepRecord) -> None:
        """Log the record's numbers at its step."""
        if record.step <= self._state["last_step"]:
            return
        self._run.log(scalars(record), step=record.step)
        self._state["last_step"] = record.step
        self._save_state()

    def event(self, name: str, **values: Any) -> None:
        """Events have no step of their own: the last one is shown in the run's summary."""
        self._run.summary[f"event/{name}"] = redact(values)

    def evaluation(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        """Log what was measured after ``step`` steps, beside that step's record."""
        if step < self._state["last_step"]:
            return
        self._run.log({f"{EVALUATION}/{name}": value for name, value in values.items()}, step=step)

    def close(self) -> None:
        """Finish the run; waits until what was logged is written or sent."""
        self._run.finish()

    def _save_state(self) -> None:
        with written_whole(self._state_path) as beside:
            beside.write_text(json.dumps(self._state))


class TensorBoardSink:
    """Writes TensorBoard event files to ``folder``.

    Args:
        folder: where the event files go.
        resume_step: steps done in the checkpoint the run starts from; TensorBoard hides what an
            earlier process wrote after it.

    Raises:
        ImportError: tensorboard is not installed.
    """

    def __init__(self, folder: str | Path, resume_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1, flush_secs=30)
        self._last_step = resume_step

    def log(self, record: StepRecord) -> None:
        """Write the record's numbers at its step."""
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record.step)
        self._last_step = record.step

    def event(self, name: str, **values: Any) -> None:
        """Write the event as text at the last step."""
        self._writer.add_text(
            f"event/{name}", json.dumps(redact(values), default=str), self._last_step
        )

    def evaluation(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        """Write what was measured after ``step`` steps."""
        for name, value in values.items():
            self._writer.add_scalar(f"{EVALUATION}/{name}", value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


def scalars(record: StepRecord) -> dict[str, float]:
    """The record's finite numbers by name, without the step."""
    return {
        name: float(value)
        for name, value in record.as_dict().items()
        if isinstance(value, (int, float)) and name != "step"
    }


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text())
        return {"id": str(state["id"]), "last_step": int(state["last_step"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {"id": secrets.token_hex(4), "last_step": 0}


def _reachable_mode(wandb: Any) -> Literal["online", "offline"]:
    """``online`` when the server answers and there is a key, else ``offline``, with the reason."""
    proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    server = os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    url = urlsplit(proxy or server)
    address = (url.hostname or "", url.port or (80 if url.scheme == "http" else 443))
    try:
        socket.create_connection(address, timeout=_NETWORK_TIMEOUT_SECONDS).close()
        if wandb.login(prompt=False):
            return "online"
        reason: object = "no API key"
    except Exception as error:
        reason = error
    logger.info("wandb is offline (%s); send the run later with: wandb sync", reason)
    return "offline"
