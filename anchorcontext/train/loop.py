"""The training loop: steps, records, guards, observers, checkpoints, stopping."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import torch

from ..config import Config, load_config, save_config
from ..errors import writing
from ..watch.flops import peak_flops
from ..watch.metrics import LocalStep, StepMeter, StepRecord, gather_steps, make_record
from ..watch.profiler import StepProfiler
from ..watch.provenance import git_commit
from ..watch.sinks import build_sinks
from ..watch.sizes import sizes_of
from .checkpoint import CheckpointStore, SaveError
from .checkpoint_files import CONFIG, WorldLayout
from .costs import predicted_bytes
from .failure import failing_together
from .guards import DivergedError, Guards, dump_step
from .job import Job, peak_dtype, run_folder
from .launch import Process
from .observers import Evaluation, Observer, ParityChecks
from .orphans import stopping_without_launcher
from .preflight import Preflight, versions
from .report import TrainReport
from .resume import check_resumable
from .retention import is_due
from .run_lock import RunLock
from .signals import StopSignals
from .step import StepOutcome, count_targets, plan_micro_batches, train_step
from .watchdog import Watchdog

logger = logging.getLogger(__name__)

GUARDS = "guards"
"""Folder of a run for what the guards found."""


class Trainer:
    """One run: builds the job, resumes where the run folder says, trains to ``train.steps``.

    Args:
        stop: what asks the run to stop before; default: nothing does.
        preflight: further checks before the model is built.
    """

    def __init__(
        self,
        config: Config,
        stop: StopSignals | None = None,
        preflight: Preflight | None = None,
    ) -> None:
        self.config = config
        self.stop = stop or StopSignals()
        self.job = Job(config, self._claiming_the_folder(preflight))
        self.control, self.mesh = self.job.control, self.job.mesh
        self.sizes = sizes_of(self.job.train_model.causal_lm)
        self.peak_flops = peak_flops(self.job.device, peak_dtype(config), config.watch.peak_flops)
        self.checkpoints = CheckpointStore(
            self.job.run_dir / "checkpoints",
            self.control,
            WorldLayout.of(config, self.mesh.world_size),
            config,
        )
        self.guards = Guards(config.guards, len(self.job.dataset))
        stacks = self.job.run_dir / GUARDS / f"stacks-rank-{self.control.rank:05d}.txt"
        self.watchdog = Watchdog(config.guards.slow_step, stacks)
        self.step = 0
        self.saved_step: int | None = None
        self.resumed_from: Path | None = None
        self._resume()
        self.report = TrainReport(
            self.job.run_dir, self.mesh.world_size, self.mesh.dp, self.mesh.sp, self.step, self.step
        )
        self.report.checkpoint = self.resumed_from
        self._failed_in_a_row = 0
        self._recorded = {"checkpoint": 0.0, "evaluation": 0.0}
        with self.control.together("writing the run folder"):
            if self.control.rank == 0:
                with writing("run.output_dir", config.run.output_dir):
                    save_config(config, self.job.run_dir / "config.yaml")
        self.made_by: dict[str, Any] = {}
        if self.control.rank == 0:
            self.made_by = {"commit": git_commit(), "versions": versions()}
        self.sinks = build_sinks(
            config,
            self.job.run_dir,
            rank=self.control.rank,
            total_steps=config.train.steps,
            start_step=self.step,
            made_by=self.made_by,
        )
        self.profiler = StepProfiler(
            config.watch.profile,
            self.job.run_dir,
            rank=self.control.rank,
            device=self.job.device,
            written=lambda step, path: self.sinks.event("profile", step=step, path=str(path)),
        )
        self.evaluation = Evaluation(config, self.job, self.sinks)
        parity = ParityChecks(config, self.job, self.sinks, self.report)
        self.observers: tuple[Observer, ...] = (self.evaluation, parity)

    def run(self) -> TrainReport:
        """Train until ``train.steps`` optimiser steps are done, or until a signal asks to stop.

        Returns:
            what this process did.

        Raises:
            ParityError: a parity check failed.
            DivergedError: loss or gradient is not finite, or a spike that stops the run.
            SaveError: checkpoints cannot be written.
        """
        with self.sinks:
            self._note_start()
            if self.step >= self.config.train.steps:
                logger.info("%s: all %d steps are done", self.job.run_dir, self.step)
                self.sinks.event("end", step=self.step)
                return self.report
            try:
                for observer in self.observers:
                    observer.before_training(self.step)
                if self._train():
                    return self.report
                for observer in self.observers:
                    observer.after_training(self.step)
            except Exception as error:
                self.sinks.event("failed", step=self.step, error=f"{type(error).__name__}: {error}")
                raise
            self.sinks.event("end", step=self.step)
        return self.report

    def _note_start(self) -> None:
        mesh, device = self.mesh, self.job.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        ranks = {"ranks": mesh.world_size, "dp": mesh.dp, "sp": mesh.sp, "device": name}
        self.sinks.event("start", step=self.step, **ranks, **self.made_by)

    def _train(self) -> bool:
        """Step after step; whether a signal ended it early. Every checkpoint due is complete."""
        total, section = self.config.train.steps, self.config.checkpoint
        while self.step < total:
            if self._agree_to_stop():
                return True
            with self.profiler.step(self.step + 1):
                self.run_step()
            last = self.step == total
            for observer in self.observers:
                observer.after_step(self.step, last)
            if is_due(self.step, total, section, healthy=self.guards.healthy):
                self._save_when_due(last)
            for observer in self.observers:
                observer.after_checkpoint(self.step, last)
        self.profiler.close()
        self._finish_saving(must=section.final)
        return False

    def _agree_to_stop(self) -> bool:
        """Whether any rank was asked to stop, and then save and say so; completes a checkpoint that
        all ranks have written."""
        asked, writing_ = self.control.sum([self.stop.name is not None, self.checkpoints.writing])
        if not asked:
            if not writing_:
                self._finish_saving()
            return False
        self.profiler.close()
        names = self.control.gather(self.stop.name)
        self.report.stopped_by = next(name for name in names if name is not None)
        self._finish_saving()
        if self.step > 0 and self.saved_step != self.step:
            self.save()
        self.sinks.event("stop", step=self.step, reason=self.report.stopped_by)
        logger.warning("%s: stopped after step %d", self.report.stopped_by, self.step)
        return True

    def run_step(self) -> StepRecord:
        """One optimiser step over ``train.windows_per_step`` windows."""
        job, meter = self.job, StepMeter(self.job.device)
        windows, epoch, position = self._window_ids(), job.loader.epoch, job.loader.position
        with self.watchdog.step():
            with meter.timed("data"):
                micro_batches = job.next_micro_batches()
                plans = plan_micro_batches(
                    micro_batches, self.mesh, self.config.attention, self.control, job.cost
                )
                num_targets = count_targets(micro_batches, self.mesh, self.control)
            if num_targets:
                sent = sum(predicted_bytes(plan, self.config, self.sizes) for plan in plans)
                meter.predict_bytes(sent)
            limits = self.guards.limits
            outcome = train_step(job.engine, plans, num_targets, meter, limits, self.control)
            self.step += 1
            ranks = self._gather(meter.finish())
        record = make_record(
            ranks,
            step=self.step,
            epoch=epoch,
            lr=outcome.lr,
            grad_norm=outcome.grad_norm,
            windows=windows,
            shape=self.sizes.flops_shape,
            peak_flops=self.peak_flops,
            **self._seconds_between(),
            skip_reason=outcome.skip_reason,
        )
        self.report.add(record)
        if record.skipped or self.step % self.config.train.log_every == 0:
            self.sinks.log(record)
        self._guard(record, ranks, outcome, position)
        return record

    def _seconds_between(self) -> dict[str, float]:
        """Time since the last record that is in no step, by the fields of a record."""
        spent = {"checkpoint": self.checkpoints.seconds, "evaluation": self.evaluation.seconds}
        since = {f"seconds_{part}": spent[part] - self._recorded[part] for part in spent}
        self._recorded = spent
        return since

    def save(self) -> Path:
        """Write a checkpoint of the steps done so far, and wait until it is complete.

        Raises:
            SaveError: it could not be written.
        """
        self._begin_saving()
        path = self._finish_saving(must=True)
        assert path is not None
        return path

    def _save_when_due(self, last: bool) -> None:
        """A checkpoint in the course of training, which may fail once or twice."""
        self._finish_saving(must=last)
        try:
            self._begin_saving()
        except SaveError as error:
            self._failed_save(error, self.step, must=last)
            return
        if last or not self.config.checkpoint.background:
            self._finish_saving(must=last)

    def _begin_saving(self) -> None:
        state = {
            "step": self.step,
            "loader": self.job.loader.state_dict(),
            "guards": self.guards.state_dict(),
        }
        self.checkpoints.save(self.job.engine, self.step, state)

    def _finish_saving(self, must: bool = False) -> Path | None:
        """Complete the checkpoint that is being written, if there is one."""
        step = self.checkpoints.pending
        if step is None:
            return None
        try:
            path = self.checkpoints.finish()
        except SaveError as error:
            self._failed_save(error, step, must)
            return None
        finally:
            self.report.seconds_saving = self.checkpoints.seconds
        self._failed_in_a_row = 0
        self.saved_step, self.report.checkpoint = step, path
        self.sinks.event("checkpoint", step=step, path=str(path))
        return path

    def _failed_save(self, error: SaveError, step: int, must: bool) -> None:
        """Training goes on: the next save may find room, and the last checkpoint is intact."""
        self._failed_in_a_row += 1
        self.report.failed_saves += 1
        self.sinks.event("checkpoint_failed", step=step, error=str(error))
        if must or self._failed_in_a_row >= self.config.checkpoint.failures:
            raise error
        logger.warning("%s", error)

    def close(self) -> None:
        """Release the engine, the run folder and the process group."""
        self.checkpoints.close()
        self.watchdog.close()
        if self.lock is not None:
            self.lock.close()
        self.job.close()

    def _claiming_the_folder(self, preflight: Preflight | None) -> Preflight:
        """The checks before the model is built, after nobody else trains in the run folder."""
        self.lock: RunLock | None = None

        def checks(config: Config, process: Process, *job: Any) -> None:
            with process.control.together("claiming the run folder"):
                if process.rank == 0:
                    self.lock = RunLock(run_folder(config))
            if preflight is not None:
                preflight(config, process, *job)

        return checks

    def _resume(self) -> None:
        checkpoint = self.checkpoints.latest()
        if checkpoint is None:
            return
        with self.control.together("comparing the config with the checkpoint's"):
            check_resumable(load_config(checkpoint.path / CONFIG), self.config)
        state = self.checkpoints.load(self.job.engine, checkpoint)
        with self.control.together("restoring the data position"):
            self.job.loader.load_state_dict(state["loader"])
            self.guards.load_state_dict(state["guards"])
        self.step = self.saved_step = state["step"]
        self.resumed_from = checkpoint.path
        logger.info("resumed from %s, %d steps done", checkpoint.path, self.step)

    def _window_ids(self) -> list[int]:
        """Dataset indices of the step's windows over all ranks."""
        loader = self.job.loader
        return loader.window_ids(loader.position, self.config.train.windows_per_step)

    def _gather(self, local: LocalStep) -> list[LocalStep]:
        return [local] if self.control.group is None else gather_steps(local, self.control.group)

    def _guard(
        self, record: StepRecord, ranks: list[LocalStep], outcome: StepOutcome, position: int
    ) -> None:
        """Report what is wrong with a step, and stop the run where a rule says so."""
        counted = sum(rank.loss_tokens for rank in ranks)
        assert outcome.num_targets == counted, (
            f"{outcome.num_targets} targets were counted in the windows, {counted} in the shards"
        )
        for finding in self.guards.judge(record):
            self.sinks.event(finding.name, step=record.step, text=finding.text)
            if self.control.rank == 0:
                logger.warning("%s", finding.text)
                folder = self.job.run_dir / GUARDS
                dump_step(folder, record, finding, self.job.dataset, position)
            if finding.stops:
                broken = [i for i, rank in enumerate(ranks) if not math.isfinite(rank.loss_sum)]
                where = f" Loss not finite on ranks {broken}." if broken else ""
                saved = "none" if self.saved_step is None else f"of step {self.saved_step}"
                raise DivergedError(
                    f"{finding.text}.{where} Nothing was saved after it: the last checkpoint is "
                    f"{saved}; what the step was made of lies in {self.job.run_dir / GUARDS}. "
                    "Look at these windows with `anchorcontext inspect`, or start a run of another "
                    "run.name with a lower optimizer.lr"
                )


def train(
    config: Config, preflight: Preflight | None = None, launcher: int | None = None
) -> TrainReport:
    """Train as configured, resuming by itself; collective over the launcher's ranks.

    ``preflight``: further checks before the model is built. ``launcher``: its process id, see
    :func:`~anchorcontext.train.orphans.stopping_without_launcher`.

    A signal (:data:`~anchorcontext.train.signals.STOP_SIGNALS`) to any rank, or the end of its
    launcher, ends the run after the step, with a checkpoint; an error of one rank ends all.
    """
    with StopSignals() as stop, stopping_without_launcher(stop, launcher):
        with failing_together():
            trainer = Trainer(config, stop, preflight)
            report = trainer.run()
        trainer.close()  # only after success: a rank that failed must not wait for the others
    return report
