"""The config of a tiny run, for tests that train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..config import Config, parse_config

TINY_SCRATCH = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""``model.scratch`` of a LLaMA that trains in milliseconds; its vocabulary is the windows'."""


def tiny_run(windows: Path, window_tokens: int, output_dir: Path, **sections: Any) -> Config:
    """A run of 4 steps in fp32 without parity checks and bar, on prepared ``windows``.

    Keys of ``sections`` (``train={"steps": 2}``) are set over these, section by section.
    """
    values: dict[str, Any] = {
        "run": {"name": "tiny", "output_dir": str(output_dir)},
        "model": {"dtype": "fp32", "gradient_checkpointing": False, "scratch": TINY_SCRATCH},
        "data": {"path": str(windows), "tokenizer": "none", "window_tokens": window_tokens},
        "optimizer": {"lr": 1e-2},
        "train": {"steps": 4, "windows_per_step": 4},
        "parity": {"at_start": False, "at_end": False},
        "watch": {"progress": False},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return parse_config(values)
