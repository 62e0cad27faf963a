"""A whole training step: P ranks of one thread against one process of P threads, same windows.

Both run what ``train`` runs: plan, shard, the model's forward and backward, the loss, DeepSpeed's
reduction and the optimiser. Cores and work are the same, so the ratio of times is what it costs to
spread a window over ranks: messages, imbalance, padding, and whatever is done P times.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..markdown import markdown_table
from ..plan.mixes import mix_lengths
from ..window import Window
from ..words import counted
from .jobs import Job

if TYPE_CHECKING:
    from ..config import Config
    from ..watch.metrics import LocalStep

TARGET = 1.10
WARM_UPS = 2
"""Connections are made and the optimiser's state is allocated in the first step."""
PARTS = {
    "attention": "attention kernels and merges",
    "exchange": "waiting for rows",
    "data": "planning and sharding",
    "optimizer": "gradient reduction and update",
    "rest": "everything else: linear layers, norms, loss",
}


@dataclass(frozen=True)
class StepPair:
    """One window's step on both sides; seconds, the slowest rank's."""

    split: dict[str, float]
    """``total`` and its ``PARTS`` on P ranks: of the rank that took longest."""
    alone: dict[str, float]
    bytes_sent: int
    """In attention, by all ranks."""

    @property
    def ratio(self) -> float:
        """Time on P ranks over time in one process."""
        return self.split["total"] / self.alone["total"]


@dataclass(frozen=True)
class StepReport:
    """What ``bench step`` found."""

    sp: int
    window_tokens: int
    documents: list[int]
    """Of each measured window."""
    mix: str
    mode: str
    pairs: list[StepPair]
    ratio: float
    """The median over the windows."""
    target: float = TARGET


def bench_step(
    config: Config,
    mix: str,
    repeats: int,
    seed: int = 0,
    tell: Callable[[str], None] = lambda line: None,
) -> StepReport:
    """Measure one step a window, the two sides in turn, ``repeats`` windows.

    Args:
        config: of the model and the training; ``parallel.sp`` ranks are compared with one process
            of as many threads. ``data`` gives the window's length alone.
        mix: named length mix of the documents (:mod:`~anchorcontext.plan.mixes`).
        repeats: measured windows.
        seed: of the first one.
        tell: hears what goes on.

    Raises:
        UserError: the config cannot be trained so, or there is no such mix.
    """
    sp = config.parallel.sp
    tokens = config.data.window_tokens
    lengths = [mix_lengths(mix, tokens - 1, seed + index) for index in range(WARM_UPS + repeats)]
    pairs = []
    with Job(Stepper, sp, 1, config, sp) as split, Job(Stepper, 1, sp, config, 1) as alone:
        for index, documents in enumerate(lengths):
            # Which side goes first alternates: neither has the caches or the clock to itself.
            order = (split, alone) if index % 2 else (alone, split)
            found = {job: job.run(documents) for job in order}
            if index < WARM_UPS:
                continue
            pair = StepPair(
                _slowest(found[split]),
                _slowest(found[alone]),
                sum(step.bytes_sent for step in found[split]),
            )
            pairs.append(pair)
            tell(
                f"window {len(pairs)} of {repeats}, {counted(len(documents), 'document')}: "
                f"{pair.split['total']:.2f} s on {sp} ranks, {pair.alone['total']:.2f} s alone"
            )
    return StepReport(
        sp=sp,
        window_tokens=tokens,
        documents=[len(documents) for documents in lengths[WARM_UPS:]],
        mix=mix,
        mode=config.attention.mode,
        pairs=pairs,
        ratio=statistics.median(pair.ratio for pair in pairs),
    )


class Stepper:
    """One rank of a training run on windows that it makes itself."""

    def __init__(self, config: Config, sp: int) -> None:
        from ..estimate.shape import configured_sizes
        from ..model import TrainModel, build_model
        from ..parallel import build_mesh
        from ..train.costs import cost_model
        from ..train.engine import build_engine
        from ..train.launch import start_process
        from ..train.seeds import seed_everything
        from ..watch.sizes import sizes_of

        parallel = config.parallel.model_copy(update={"sp": sp})
        attention = config.attention
        if sp == 1:  # nobody to swap heads or rows with
            attention = attention.model_copy(update={"exchange": "auto", "ulysses": 1})
        self.config = config.model_copy(update={"parallel": parallel, "attention": attention})
        process = start_process()
        self.control, self.device = process.control, process.device
        self.config.check_world(process.world_size)
        self.mesh = build_mesh(sp)
        seed_everything(config.run.seed)
        self.vocab_size = configured_sizes(config).vocab_size
        model = build_model(
            config.model,
            window_tokens=config.longest_position,
            seed=config.run.seed,
            vocab_size=self.vocab_size,
            precision=config.attention.precision,
        )
        self.cost = cost_model(self.config, sizes_of(model))
        train_model = TrainModel(model, config.loss.chunk_tokens).to(self.device)
        self.engine = build_engine(train_model, self.config, self.device)

    def __call__(self, documents: np.ndarray) -> LocalStep:
        """One optimiser step on a window of random tokens with documents of these lengths."""
        from ..data import configured_view
        from ..train.step import count_targets, plan_micro_batches, train_step
        from ..watch.metrics import StepMeter

        tokens = np.random.default_rng(len(documents)).integers(
            1, self.vocab_size, int(documents.sum())
        )
        parts = [part.tolist() for part in np.split(tokens, np.cumsum(documents)[:-1])]
        view = configured_view(self.config)
        anchor = 0 if view.mode.has_anchor or view.anchor_copies else None
        window = view.apply(Window.from_documents(parts, anchor, self.config.attention.mode))
        windows = [[window] * self.config.train.micro_batch_windows]
        windows *= self.config.check_world(self.mesh.world_size).accumulation
        meter = StepMeter(self.device)
        with meter.timed("data"):
            plans = plan_micro_batches(
                windows, self.mesh, self.config.attention, self.control, self.cost
            )
            targets = count_targets(windows, self.mesh, self.control)
        train_step(self.engine, plans, targets, meter)
        return meter.finish()


def _slowest(ranks: list[LocalStep]) -> dict[str, float]:
    """Seconds of the rank that took longest, in parts."""
    step = max(ranks, key=lambda rank: rank.seconds)
    parts = {
        "attention": step.seconds_attention,
        "exchange": step.seconds_exchange,
        "data": step.seconds_data,
        "optimizer": step.seconds_optimizer,
    }
    return {"total": step.seconds, **parts, "rest": step.seconds - sum(parts.values())}


def part_rows(report: StepReport) -> list[tuple[str, ...]]:
    """Where the time goes: each part over the whole step in one process, medians."""

    def median(name: str, side: str) -> str:
        values = [getattr(pair, side)[name] / pair.alone["total"] for pair in report.pairs]
        return f"{statistics.median(values):.3f}"

    names = {**PARTS, "total": "the step"}
    return [(text, median(name, "split"), median(name, "alone")) for name, text in names.items()]


def part_headers(report: StepReport) -> tuple[str, ...]:
    """Of :func:`part_rows`."""
    return ("part of the step", f"{report.sp} ranks", "one process")


def step_markdown(report: StepReport, setting: str, command: str) -> str:
    """The section of docs/benchmarks.md."""
    ratios = ", ".join(f"{pair.ratio:.3f}" for pair in report.pairs)
    return "\n\n".join(
        [
            "## A training step on several ranks",
            f"Written by `{command}`. {setting} Plan, shard, forward, backward, loss, reduction "
            f"and optimiser; {report.sp} ranks of one thread and one process of {report.sp} "
            "threads in turn on the same windows.",
            f"Time on {report.sp} ranks over one process: **{report.ratio:.3f}**, the median of "
            f"{counted(len(report.pairs), 'window')} ({ratios}); target: at most "
            f"{report.target:.2f}.",
            markdown_table(part_headers(report), part_rows(report)),
            "Parts are those of the slowest rank, over the whole step in one process.",
        ]
    )
