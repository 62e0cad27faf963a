"""Peak memory of one training step of a long window with each memory lever, predicted and measured.

Every row is a process of its own on one rank: growth of the highest resident set (VmHWM) over
building the model, one step as ``train`` runs it, and the optimiser. Host and device are one memory
on a CPU, so offloading changes nothing here; what it would leave on a GPU is the estimate's.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..markdown import markdown_table
from ..plan.mixes import mix_lengths
from .jobs import Job
from .step import Stepper

if TYPE_CHECKING:
    from ..config import Config

MIB = 2**20
MALLOPT_MMAP_THRESHOLD = -3
CHECKPOINTED = {"gradient_checkpointing": True}
HEADERS = (
    "levers",
    "measured, MiB",
    "over none",
    "predicted, MiB",
    "predicted on a GPU, MiB",
    "CPU time over none",
)


@dataclass(frozen=True)
class MemoryRow:
    """One combination of levers; bytes of one rank."""

    levers: str
    measured: int
    predicted: int
    predicted_on_gpu: int
    seconds: float
    """CPU time of the step, all threads."""


def lever_rows(config: Config, chunk_tokens: int) -> dict[str, Config]:
    """The configs that are compared, by the keys that make them differ.

    Args:
        chunk_tokens: of chunked MLPs.
    """
    # Buckets of the reduction (2 GB on a GPU) would hide what is compared.
    zero = {"zero_optimization": {"reduce_bucket_size": 1_000_000}}
    base = config.model_copy(
        update={
            "train": config.train.model_copy(update={"zero_stage": 1}),
            "parallel": config.parallel.model_copy(update={"sp": 1}),
            "deepspeed": zero,
        }
    )
    base = _with(base, "model", gradient_checkpointing=False)
    whole = _with(base, "loss", chunk_tokens=config.data.window_tokens)
    chunked = {"mlp_chunk_tokens": chunk_tokens}
    kept = {**CHECKPOINTED, "keep_attention": True}
    return {
        "none (logits whole)": whole,
        f"loss.chunk_tokens: {config.loss.chunk_tokens}": base,
        "+ mlp_chunk_tokens": _with(base, "model", **chunked),
        "+ gradient_checkpointing": _with(base, "model", **CHECKPOINTED),
        "+ gradient_checkpointing, checkpoint_every: 2": _with(
            base, "model", **CHECKPOINTED, checkpoint_every=2
        ),
        "+ gradient_checkpointing, keep_attention": _with(base, "model", **kept),
        "+ gradient_checkpointing, mlp_chunk_tokens": _with(
            base, "model", **CHECKPOINTED, **chunked
        ),
        "+ gradient_checkpointing, keep_attention, mlp_chunk_tokens": _with(
            base, "model", **kept, **chunked
        ),
        "+ gradient_checkpointing, mlp_chunk_tokens, offload_activations": _with(
            base, "model", **CHECKPOINTED, **chunked, offload_activations=True
        ),
        "+ offload_optimizer": _with(base, "train", offload_optimizer="cpu"),
    }


def bench_memory(
    config: Config,
    mix: str = "slimpajama",
    chunk_tokens: int = 4096,
    threads: int = 1,
    tell: Callable[[str], None] = lambda line: None,
) -> list[MemoryRow]:
    """Measure one step of one window with each combination of levers.

    Args:
        config: of the model and the training, on one rank; ``data`` gives the window's length.
        mix: named length mix of the documents (:mod:`~anchorcontext.plan.mixes`).
        chunk_tokens: of chunked MLPs.
        threads: of the process.
        tell: hears what goes on.

    Raises:
        UserError: the config cannot be trained so, or there is no such mix.
    """
    documents = mix_lengths(mix, config.data.window_tokens - 1, 0)
    rows = []
    for levers, changed in lever_rows(config, chunk_tokens).items():
        with Job(MemoryRank, 1, threads, changed) as job:
            ((measured, seconds),) = job.run(documents)
        rows.append(
            MemoryRow(
                levers=levers,
                measured=measured,
                predicted=predicted_peak(changed, on_cpu=True),
                predicted_on_gpu=predicted_peak(changed, on_cpu=False),
                seconds=seconds,
            )
        )
        tell(f"{levers}: {measured / MIB:,.0f} MiB, {seconds:.1f} CPU seconds")
    return rows


def predicted_peak(config: Config, *, on_cpu: bool) -> int:
    """What ``anchorcontext plan`` says of one rank alone, bytes."""
    from ..estimate.memory import activation_memory, estimate_memory, state_memory
    from ..estimate.shape import configured_sizes

    sizes = configured_sizes(config)
    work = activation_memory(
        sizes,
        config,
        tokens=config.data.window_tokens * config.train.micro_batch_windows,
        key_rows=0,
        step_rows=0,
        received_rows=0,
        sp_size=1,
        ulysses=1,
        on_cpu=on_cpu,
    )
    states = state_memory(sizes, config, 1, lazy=on_cpu)
    return estimate_memory(states, work, config.check_world(1).accumulation, np.inf).peak


class MemoryRank:
    """One process that measures one step."""

    def __init__(self, config: Config) -> None:
        # Freed blocks go back at once; glibc would keep what it may use again.
        ctypes.CDLL(None).mallopt(MALLOPT_MMAP_THRESHOLD, MIB)
        self.config = config

    def __call__(self, documents: np.ndarray) -> tuple[int, float]:
        """Growth of the highest resident set in bytes, and CPU seconds of the step, which other
        processes hardly disturb."""
        if self.config.model.scratch is not None:  # what is imported and set up once
            scratch = {**self.config.model.scratch, "hidden_size": 64, "num_hidden_layers": 1}
            Stepper(_with(self.config, "model", scratch=scratch), 1)(np.array([64]))
        before = _status("VmRSS")
        stepper = Stepper(self.config, 1)
        start = time.process_time()
        stepper(documents)
        return _status("VmHWM") - before, time.process_time() - start


def memory_rows(rows: list[MemoryRow]) -> list[tuple[str, ...]]:
    """The table under :data:`HEADERS`."""
    none = rows[0]
    return [
        (
            row.levers,
            f"{row.measured / MIB:,.0f}",
            f"{row.measured / none.measured:.2f}",
            f"{row.predicted / MIB:,.0f}",
            f"{row.predicted_on_gpu / MIB:,.0f}",
            f"{row.seconds / none.seconds:.2f}",
        )
        for row in rows
    ]


def memory_markdown(rows: list[MemoryRow], setting: str, command: str) -> str:
    """The section of docs/benchmarks.md."""
    return "\n\n".join(
        [
            "## Memory of a training step",
            f"Written by `{command}`. {setting} One step on one rank, ZeRO-1, in a process of its "
            "own for each row: growth of the highest resident set over model, step and optimiser. "
            "`+` adds to the chunked loss. CPU time is of that one step, all threads. Host and "
            "device are one memory on a CPU, so offloading saves nothing here; the last column but "
            "one is what `anchorcontext plan` says of a GPU.",
            markdown_table(HEADERS, memory_rows(rows)),
        ]
    )


def _with(config: Config, section: str, **values: Any) -> Config:
    changed = getattr(config, section).model_copy(update=values)
    return config.model_copy(update={section: changed})


def _status(key: str) -> int:
    """A figure of this process in bytes: ``VmRSS`` or ``VmHWM``."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
