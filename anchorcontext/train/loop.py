"""The training loop: steps, records, parity checks, checkpoints."""

from __future__ import annotations

import logging
import math
from pathlib import Path

from ..config import Config, load_config, save_config
from ..errors import writing
from ..parity.check import check_logits
from ..watch.flops import model_shape, peak_flops
from ..watch.metrics import LocalStep, StepMeter, StepRecord, gather_steps, make_record
from ..watch.sinks import build_sinks
from .checkpoint import CheckpointStore, WorldLayout
from .job import Job, peak_dtype
from .report import TrainReport
from .resume import check_resumable
from .step import StepOutcome, count_targets, plan_micro_batches, train_step

logger = logging.getLogger(__name__)


class DivergedError(RuntimeError):
    """Loss or gradient is not finite; raised on every rank alike, before anything is saved."""


class Trainer:
    """One run: builds the job, resumes where the run folder says, trains to ``train.steps``."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.job = Job(config)
        self.control, self.mesh = self.job.control, self.job.mesh
        self.shape = model_shape(self.job.train_model.causal_lm)
        self.peak_flops = peak_flops(self.job.device, peak_dtype(config), config.watch.peak_flops)
        self.checkpoints = CheckpointStore(
            self.job.run_dir / "checkpoints",
            self.control,
            WorldLayout.of(config, self.mesh.world_size),
            config,
        )
        self.step = 0
        self.saved_step: int | None = None
        self._resume()
        self.report = TrainReport(
            self.job.run_dir, self.mesh.world_size, self.mesh.dp, self.mesh.sp, self.step, self.step
        )
        with self.control.together("writing the run folder"):
            if self.control.rank == 0:
                with writing("run.output_dir", config.run.output_dir):
                    save_config(config, self.job.run_dir / "config.yaml")
        self.sinks = build_sinks(
            config,
            self.job.run_dir,
            rank=self.control.rank,
            total_steps=config.train.steps,
            start_step=self.step,
        )

    def run(self) -> TrainReport:
        """Train until ``train.steps`` optimiser steps are done; returns what this process did.

        Raises:
            ParityError: a parity check failed.
            DivergedError: loss or gradient is not finite.
        """
        every, parity = self.config.checkpoint.every, self.config.parity
        with self.sinks:
            self.sinks.event("start", step=self.step, ranks=self.mesh.world_size)
            if self.step >= self.config.train.steps:
                logger.info("%s: all %d steps are done", self.job.run_dir, self.step)
                return self.report
            if parity.at_start:
                self.check_parity("before the first step")
            while self.step < self.config.train.steps:
                self.run_step()
                last = self.step == self.config.train.steps
                if (every and self.step % every == 0) or (last and self.config.checkpoint.final):
                    self.save()
                if parity.every and self.step % parity.every == 0 and not last:
                    self.check_parity(f"after step {self.step}")
            if parity.at_end:
                self.check_parity("after the last step")
            self.sinks.event("end", step=self.step)
        return self.report

    def run_step(self) -> StepRecord:
        """One optimiser step over ``train.windows_per_step`` windows."""
        job, meter = self.job, StepMeter(self.job.device)
        windows, epoch = self._window_ids(), job.loader.epoch
        with meter.timed("data"):
            micro_batches = job.next_micro_batches()
            plans = plan_micro_batches(
                micro_batches, self.mesh, self.config.attention, self.control, job.cost
            )
            num_targets = count_targets(micro_batches, self.mesh, self.control)
        outcome = train_step(job.engine, plans, num_targets, meter)
        self.step += 1
        ranks = self._gather(meter.finish())
        record = make_record(
            ranks,
            step=self.step,
            epoch=epoch,
            lr=outcome.lr,
            grad_norm=outcome.grad_norm,
            windows=windows,
            shape=self.shape,
            peak_flops=self.peak_flops,
            skip_reason=outcome.skip_reason,
        )
        self.report.add(record)
        if record.skipped or self.step % self.config.train.log_every == 0:
            self.sinks.log(record)
        self._check_finite(record, ranks, outcome)
        return record

    def check_parity(self, when: str) -> None:
        """Compare the live weights' logits on the next windows with a single device.

        Raises:
            ParityError: past tolerance.
        """
        found = check_logits(
            self.job.engine,
            self.job.peek_micro_batches(),
            self.mesh,
            self.control,
            self.config,
            title=f"logit check {when}",
            cost=self.job.cost,
        )
        logits = found.comparisons[0].logits
        assert logits is not None, "a logit check compares logits"
        self.report.add_parity(logits.max_abs)
        self.sinks.event(
            "parity",
            step=self.step,
            passed=found.passed,
            largest_logit_difference=logits.max_abs,
            mean_logit_difference=logits.mean_abs,
        )
        found.raise_if_failed()

    def save(self) -> Path:
        """Write a checkpoint of the steps done so far."""
        state = {"step": self.step, "loader": self.job.loader.state_dict()}
        path = self.checkpoints.save(self.job.engine, self.step, state)
        self.saved_step, self.report.checkpoint = self.step, path
        self.sinks.event("checkpoint", step=self.step, path=str(path))
        return path

    def close(self) -> None:
        """Release the engine and the process group."""
        self.job.close()

    def _resume(self) -> None:
        checkpoint = self.checkpoints.latest()
        if checkpoint is None:
            return
        with self.control.together("comparing the config with the checkpoint's"):
            check_resumable(load_config(checkpoint.path / "config.yaml"), self.config)
        state = self.checkpoints.load(self.job.engine, checkpoint)
        with self.control.together("restoring the data position"):
            self.job.loader.load_state_dict(state["loader"])
        self.step = self.saved_step = state["step"]
        logger.info("resumed from %s, %d steps done", checkpoint.path, self.step)

    def _window_ids(self) -> list[int]:
        """Dataset indices of the step's windows over all ranks."""
        loader = self.job.loader
        return loader.window_ids(loader.position, self.config.train.windows_per_step)

    def _gather(self, local: LocalStep) -> list[LocalStep]:
        return [local] if self.control.group is None else gather_steps(local, self.control.group)

    def _check_finite(
        self, record: StepRecord, ranks: list[LocalStep], outcome: StepOutcome
    ) -> None:
        counted = sum(rank.loss_tokens for rank in ranks)
        assert outcome.num_targets == counted, (
            f"{outcome.num_targets} targets were counted in the windows, {counted} in the shards"
        )
        broken = [index for index, rank in enumerate(ranks) if not math.isfinite(rank.loss_sum)]
        norm = outcome.grad_norm
        if not broken and (norm is None or math.isfinite(norm)):
            return
        where = f"loss not finite on ranks {broken}" if broken else f"gradient norm is {norm}"
        saved = "none" if self.saved_step is None else f"of step {self.saved_step}"
        raise DivergedError(
            f"step {self.step}: {where}; windows {list(record.windows)} of "
            f"{self.job.dataset.path}. The step was not applied and nothing was saved; the last "
            f"checkpoint is {saved}. Lower optimizer.lr, or look at these windows with "
            "`anchorcontext inspect`"
        )


def train(config: Config) -> TrainReport:
    """Train as configured, resuming by itself; collective over the launcher's ranks."""
    trainer = Trainer(config)
    report = trainer.run()
    trainer.close()  # only after success: a rank that failed must not wait for the others
    return report
