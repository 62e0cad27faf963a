"""The parity check: what the distributed run computes against what one device would.

``check_parity`` compares logits, loss and every parameter's gradient with stock transformers and
with our own path on one device. ``check_logits`` runs forward only and is cheap enough to repeat
while training. Both read live weights under every ZeRO stage and leave the engine, its gradients
and optimiser state, and the random states as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..errors import UserError
from ..evaluate.tally import preserved_rng
from ..parallel import Mesh, Plan
from ..plan import CostModel
from ..train.consolidate import gather_state_dict
from ..train.control import Control
from ..train.step import count_targets, plan_micro_batches
from ..window import Window
from .baseline import Baseline, BaselineRun, SingleDeviceBaseline, StockBaseline
from .compare import LogitsDifference, TensorDifference, compare_tensors
from .live import (
    LiveRun,
    WindowShard,
    discard_gradients,
    full_gradients,
    locate_windows,
    run_live,
    stream_logits,
)
from .ranks import on_rank_zero
from .report import Comparison, GradientRow, ParityReport, judge_gradients, judge_logits, judge_loss
from .tolerances import Tolerances, tolerances_for

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from ..config import Config

MicroBatches = Sequence[Sequence[Window]]
BaselineMaker = Callable[[torch.dtype], Baseline]


def check_parity(
    engine: DeepSpeedEngine,
    micro_batches: MicroBatches,
    mesh: Mesh,
    control: Control,
    config: Config,
    *,
    cost: CostModel | None = None,
) -> ParityReport:
    """Compare logits, loss and gradients of one step with both baselines; collective.

    Args:
        engine: the DeepSpeed engine around ``TrainModel``, between two steps.
        micro_batches: this rank's windows of the step, as in training.
        mesh, control: of the run.
        config: the resolved config; ``parity`` holds the limits.
        cost: of a layer, as training plans with it.

    Returns:
        The report, the same on every rank. Nothing is raised when it did not pass.

    Raises:
        UserError: no window has a target, so that there is no loss to compare.
    """
    cut = config.parity.stock_tokens
    short = [[window.prefix(cut) for window in windows] for windows in micro_batches]
    job = _Job(engine, mesh, control, config, cost, gradients=True)
    comparisons = [
        job.compare(StockBaseline.name, job.stock, short),
        job.compare(SingleDeviceBaseline.name, job.single, micro_batches),
    ]
    return job.report("parity", comparisons)


def check_logits(
    engine: DeepSpeedEngine,
    micro_batches: MicroBatches,
    mesh: Mesh,
    control: Control,
    config: Config,
    *,
    title: str = "logit check",
    cost: CostModel | None = None,
) -> ParityReport:
    """Compare logits and loss of the live weights with our path on one device; collective.

    Forward only, so that training can repeat it. Arguments and result as of :func:`check_parity`;
    the caller ends the run with ``report.raise_if_failed()``.
    """
    job = _Job(engine, mesh, control, config, cost, gradients=False)
    comparison = job.compare(SingleDeviceBaseline.name, job.single, micro_batches)
    return job.report(title, [comparison])


@dataclass(frozen=True)
class _Found:
    """Differences on rank 0: the distributed run against the baseline, and in low precision both of
    them against an fp32 baseline."""

    logits: list[LogitsDifference]
    loss_sum: float
    gradients: list[list[TensorDifference]]


class _Job:
    """One check: the engine, the live weights of rank 0, and the limits."""

    def __init__(
        self,
        engine: DeepSpeedEngine,
        mesh: Mesh,
        control: Control,
        config: Config,
        cost: CostModel | None,
        *,
        gradients: bool,
    ) -> None:
        self.engine, self.mesh, self.control, self.config = engine, mesh, control, config
        self.cost, self.gradients = cost, gradients
        self.model = engine.module.causal_lm
        self.dtype = self.model.dtype
        given = config.parity
        self.limits = tolerances_for(
            self.dtype, logits=given.logits, loss=given.loss, gradient=given.gradient
        )
        self.weights: Mapping[str, torch.Tensor] = gather_state_dict(engine)

    def stock(self, dtype: torch.dtype) -> Baseline:
        return StockBaseline(self.model, self.weights, dtype, self.engine.device)

    def single(self, dtype: torch.dtype) -> Baseline:
        return SingleDeviceBaseline(
            self.model,
            self.weights,
            dtype,
            self.engine.device,
            self.config.loss.chunk_tokens,
            self.config.attention,
        )

    def report(self, title: str, comparisons: list[Comparison]) -> ParityReport:
        """Rank 0's report, on every rank."""
        mesh, stage = self.mesh, self.config.train.zero_stage
        name = f"{title}: dp {mesh.dp} x sp {mesh.sp}, ZeRO-{stage}, {self.config.model.dtype}"
        report: ParityReport = self.control.from_first(ParityReport(name, comparisons))
        return report

    def compare(self, name: str, make: BaselineMaker, micro_batches: MicroBatches) -> Comparison:
        """The distributed run over ``micro_batches`` against one kind of baseline; collective.

        The result counts on rank 0 only.
        """
        engine, control = self.engine, self.control
        num_targets = count_targets(micro_batches, self.mesh, control)
        if num_targets == 0 and self.gradients:
            raise UserError(
                f"{name}: the windows to compare hold no target, so there is no loss; raise "
                "parity.stock_tokens or compare more windows"
            )
        with preserved_rng(engine.device):
            plans = plan_micro_batches(
                micro_batches, self.mesh, self.config.attention, control, self.cost
            )
            located = locate_windows(micro_batches, plans, self.mesh, control)
            scale = engine.world_size / num_targets if self.gradients else None
            try:
                live = run_live(engine, plans, control, scale)
                found = self._against(make, plans, located, live, num_targets)
            finally:
                if self.gradients:
                    discard_gradients(engine)
        if control.rank != 0:
            return Comparison(name, num_windows=0, num_tokens=0)
        return self._judge(name, located, live, num_targets, found)

    def _against(
        self,
        make: BaselineMaker,
        plans: Sequence[Plan],
        located: Sequence[WindowShard],
        live: LiveRun,
        num_targets: int,
    ) -> _Found:
        exact = self.gradients and any(map(self.limits.multiple_of, ("logits", "gradient")))
        dtypes = [self.dtype, torch.float32] if exact else [self.dtype]
        baselines = on_rank_zero(
            self.control, lambda: [make(dtype) for dtype in dtypes], "the baseline's model"
        )
        scale = 1.0 / num_targets if self.gradients else None
        # Live against the baseline; with an exact run, live against it and the baseline against it.
        logits = [LogitsDifference() for _ in range(3 if exact else 1)]
        loss_sum = 0.0
        for item in located:
            run_all = partial(_run_all, baselines or [], item.window, scale)
            runs = on_rank_zero(self.control, run_all, f"{item.window!r} on one device")
            loss_sum += runs[0].loss_sum if runs else 0.0
            stream_logits(
                live, plans, item, self.control, _comparer(item.index, runs or [], logits)
            )
        gradients = self._compare_gradients(baselines or []) if self.gradients else []
        return _Found(logits, loss_sum, gradients)

    def _compare_gradients(self, baselines: Sequence[Baseline]) -> list[list[TensorDifference]]:
        references = [baseline.gradients() for baseline in baselines]
        differences: list[list[TensorDifference]] = [[] for _ in range(3)]
        for name, gradient in full_gradients(self.engine.module):
            if not references:
                continue
            single, exact = references[0].pop(name, None), references[-1].pop(name, None)
            pairs = [(gradient, single)]
            if len(references) > 1:
                pairs += [(gradient, exact), (single, exact)]
            for into, (value, reference) in zip(differences, pairs, strict=False):
                into.append(_difference(name, value, reference, self.limits))
        for name, reference in references[0].items() if references else ():
            for into in differences:
                into.append(_difference(name, None, reference, self.limits))
        return differences

    def _judge(
        self,
        name: str,
        located: Sequence[WindowShard],
        live: LiveRun,
        num_targets: int,
        found: _Found,
    ) -> Comparison:
        to_exact = (found.logits[1], found.logits[2]) if len(found.logits) > 1 else None
        checks = judge_logits(found.logits[0], self.limits, to_exact)
        if num_targets:
            losses = live.loss_sum / num_targets, found.loss_sum / num_targets
            checks.append(judge_loss(*losses, self.limits))
        rows: list[GradientRow] = []
        if self.gradients:
            first, *others = found.gradients
            exact = (others[0], others[1]) if to_exact is not None else None
            check, rows = judge_gradients(first, self.limits, exact)
            checks.append(check)
        return Comparison(
            baseline=name,
            num_windows=len(located),
            num_tokens=sum(item.window.num_tokens for item in located),
            checks=checks,
            gradients=rows,
            logits=found.logits[0],
        )


def _run_all(
    baselines: Sequence[Baseline], window: Window, scale: float | None
) -> list[BaselineRun]:
    return [baseline.run(window, scale) for baseline in baselines]


def _comparer(
    index: int, runs: Sequence[BaselineRun], into: Sequence[LogitsDifference]
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Adds a chunk of live logits of window ``index`` to the differences."""

    def consume(tokens: torch.Tensor, logits: torch.Tensor) -> None:
        single = runs[0].logits(tokens)
        into[0].add(index, tokens, logits, single)
        if len(into) > 1:
            exact = runs[1].logits(tokens)
            into[1].add(index, tokens, logits, exact)
            into[2].add(index, tokens, single, exact)

    return consume


def _difference(
    name: str, value: torch.Tensor | None, reference: torch.Tensor | None, limits: Tolerances
) -> TensorDifference:
    if value is None and reference is not None and not bool(reference.any()):
        value = torch.zeros_like(reference)  # a parameter that no window uses
    return compare_tensors(
        name, value, reference, relative=limits.gradient, absolute=limits.gradient_absolute
    )
