"""What looks at the live weights between two steps: evaluation and parity checks.

An observer is called on every rank and leaves weights, optimiser, data order and random states as
they were; its time is in no step's seconds, and no guard watches it.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch

from ..evaluate.live import build_measures
from ..parity.check import check_logits
from ..watch.sizes import sizes_of
from .costs import plan_options

if TYPE_CHECKING:
    from ..config import Config
    from ..watch.sinks import Sinks
    from .job import Job
    from .report import TrainReport


logger = logging.getLogger(__name__)

FP32, GIB = 4, 2**30


class Observer:
    """Does nothing at any of its times; collective. ``step``: optimiser steps done."""

    def before_training(self, step: int) -> None:
        """Before this process's first step."""

    def after_step(self, step: int, last: bool) -> None:
        """Before a checkpoint of this step is written, so that a resume never misses one."""

    def after_checkpoint(self, step: int, last: bool) -> None:
        """After a checkpoint of this step, if one is due."""

    def after_training(self, step: int) -> None:
        """After the last step, its checkpoint complete."""


class ParityChecks(Observer):
    """The live weights' logits on the next windows against a single device.

    Raises:
        ParityError: past tolerance.
    """

    def __init__(self, config: Config, job: Job, sinks: Sinks, report: TrainReport) -> None:
        self.config, self.job, self.sinks, self.report = config, job, sinks, report

    def before_training(self, step: int) -> None:
        if self.config.parity.at_start:
            self.check(step, "before the first step")

    def after_checkpoint(self, step: int, last: bool) -> None:
        every = self.config.parity.every
        if every and step % every == 0 and not last:
            self.check(step, f"after step {step}")

    def after_training(self, step: int) -> None:
        if self.config.parity.at_end:
            self.check(step, "after the last step")

    def check(self, step: int, when: str) -> None:
        """One check, noted as an event; left out where rank 0's GPU cannot hold the model whole."""
        job = self.job
        # Not of one rank only: the check is collective.
        needed, free = job.control.from_first((self._needed_bytes(), free_bytes(job.device)))
        if free is not None and needed > free:
            text = (
                f"the logit check {when} is left out: one device has to hold all weights and a "
                f"forward over a window, an estimated {needed / GIB:.1f} GiB, and rank 0's has "
                f"{free / GIB:.1f} GiB free; parity.at_start=false and parity.at_end=false say so"
            )
            self.sinks.event("parity_left_out", step=step, text=text)
            if job.control.rank == 0:
                logger.warning("%s", text)
            return
        found = check_logits(
            job.engine,
            job.peek_micro_batches(),
            job.mesh,
            job.control,
            self.config,
            title=f"logit check {when}",
            cost=job.cost,
        )
        logits = found.comparisons[0].logits
        assert logits is not None, "a logit check compares logits"
        self.report.add_parity(logits.max_abs)
        self.sinks.event(
            "parity",
            step=step,
            passed=found.passed,
            largest_logit_difference=logits.max_abs,
            mean_logit_difference=logits.mean_abs,
        )
        found.raise_if_failed()

    def _needed_bytes(self) -> int:
        """Of the model and a forward over a window on one device, and of the fp32 heads."""
        config, causal_lm = self.config, self.job.train_model.causal_lm
        sizes, element = sizes_of(causal_lm), causal_lm.dtype.itemsize
        heads = sizes.num_heads + 2 * sizes.num_kv_heads
        width = 3 * (sizes.hidden_size + sizes.intermediate_size) + heads * sizes.head_dim
        fp32 = 2 * sizes.hidden_size + sizes.num_heads * sizes.head_dim
        window = config.data.window_tokens * (element * width + FP32 * fp32)
        chunk = 2 * FP32 * config.loss.chunk_tokens * sizes.vocab_size
        return sizes.parameters * element + 2 * FP32 * sizes.head_weights + window + chunk


def free_bytes(device: torch.device) -> int | None:
    """What a GPU can still give, what torch holds unused included; None for a CPU."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


class Evaluation(Observer):
    """What the section ``evaluate`` asks for; the results go to all sinks.

    Raises:
        UserError: on every rank, when the data or the tokenizer cannot serve a task.
    """

    def __init__(self, config: Config, job: Job, sinks: Sinks) -> None:
        self.section, self.job, self.sinks = config.evaluate, job, sinks
        engine = config.attention.engine
        self.options = {**plan_options(config.attention, job.cost), "engine": engine}
        self.seconds = 0.0
        """Spent so far."""
        with job.control.together("preparing the evaluation"):
            self.measures = build_measures(config, job.dataset, job.loader.view)

    def before_training(self, step: int) -> None:
        if step == 0 and self.section.at_start:
            self.evaluate(step)

    def after_step(self, step: int, last: bool) -> None:
        every = self.section.every
        if every is not None and (last or step % every == 0):
            self.evaluate(step)

    def evaluate(self, step: int) -> None:
        """Measure everything on the weights as they are."""
        if not self.measures:
            return
        job, started = self.job, time.perf_counter()
        values: dict[str, float] = {}
        for measure in self.measures:
            values |= measure.on(job.engine.module, job.mesh, job.device, self.options)
        seconds = time.perf_counter() - started
        self.seconds += seconds
        self.sinks.evaluation(step, values, seconds)
