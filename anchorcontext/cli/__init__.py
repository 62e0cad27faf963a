"""The ``anchorcontext`` command. A command's module is imported only when it is called.

``cli/common.py`` says how to write a command.
"""

from __future__ import annotations

from typing import Any

import click

from anchorcontext.cli.lazy import LazyGroup

# In the order in which a run needs them. The module of ``import-gguf`` is ``cli/import_gguf.py``.
COMMANDS = {
    "prepare": "Turn a corpus into tokenised, packed windows on disk.",
    "inspect": "Show one window: documents, positions, mask, layout, who sends what.",
    "plan": "Predict memory, traffic and step time before any GPU is held.",
    "train": "Train; resumes by itself. Run it under torchrun, deepspeed or srun.",
    "submit": "Train as a SLURM job: show and submit the batch script.",
    "parity": "Compare the distributed run with a single device; exits 1 past tolerance.",
    "evaluate": "Score models: RULER, LongBench, HellaSwag, MMLU, loss by position.",
    "diagnose": "Measure what low precision does to RoPE and attention, and where.",
    "report": "Sum up a run: loss, speed, memory, traffic, parity, where everything lies.",
    "compare": "Compare runs: what differs in their configs, cost, losses and scores.",
    "export": "Turn a checkpoint into a plain Hugging Face folder.",
    "average": "Average snapshots: their weights, or their scores.",
    "import-gguf": "Turn a GGUF file into a plain Hugging Face folder.",
    "bench": "Compare layouts, exchanges and steps with named baselines.",
    "doctor": "Show packages and attention engines, and how to add what is missing.",
    "config": "Check a config and show it resolved, or list every key.",
}


@click.group(
    cls=LazyGroup,
    listed=COMMANDS,
    package=__name__,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="anchorcontext", prog_name="anchorcontext")
def group() -> None:
    """Distributed long-context training with AnchorAttention.

    Every command takes a YAML file and KEY=VALUE overrides of it:

        anchorcontext train configs/demo.yaml train.steps=20 optimizer.lr=1e-4
    """


def main(*args: Any, **kwargs: Any) -> None:
    """Entry point of the console script and of ``python -m anchorcontext``."""
    group(*args, **kwargs)
