"""Models of the laboratory: pretrained, or a random-initialised twin, in any of four dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..config.sections import ModelSection
from ..errors import UserError
from ..model.load import build_config, build_model
from ..model.rope import cast_parameters, verify_rope
from .rotary import ExactRotary, Rotary, exact_norms
from .walk import check_walkable
from .workers import Workers

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
WEIGHTS = ("pretrained", "random")


@dataclass(frozen=True, order=True)
class Setting:
    """Which weights in which dtype, written ``pretrained:bf16``."""

    weights: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.weights}:{self.dtype}"

    @classmethod
    def parse(cls, text: str) -> Setting:
        """The setting that ``text`` names; ``bf16`` alone is ``pretrained:bf16``.

        Raises:
            UserError: unknown weights or dtype.
        """
        weights, _, dtype = text.strip().rpartition(":")
        weights = weights or "pretrained"
        if weights not in WEIGHTS or dtype not in DTYPES:
            raise UserError(
                f"setting {text!r}: give weights ({', '.join(WEIGHTS)}) and dtype "
                f"({', '.join(DTYPES)}), as in pretrained:bf16"
            )
        return cls(weights, dtype)


def read_config(path: str, longest: int) -> PreTrainedConfig:
    """The config of the model at ``path``, checked for windows of ``longest`` tokens.

    Raises:
        UserError: no model there; positions that are not RoPE; a feature the walk would lose.
    """
    return build_config(_section(path, longest), window_tokens=longest)


def trained_length(path: str) -> int | None:
    """``max_position_embeddings`` of the model at ``path``, whatever is asked of it; None: unknown.

    :func:`read_config` raises it to the length that it is asked for.
    """
    config = AutoConfig.from_pretrained(path).get_text_config()
    length: int | None = getattr(config, "max_position_embeddings", None)
    return length


@contextmanager
def lab_model(
    path: str,
    setting: Setting,
    *,
    workers: Workers,
    longest: int,
    seed: int = 0,
    device: str = "cpu",
) -> Iterator[tuple[PreTrainedModel, Rotary | None]]:
    """The model of a setting, in eval mode, and the RoPE to walk it with (None: its own).

    In fp64 the tables and the norms are fp64 too (:class:`~.rotary.ExactRotary`,
    :func:`~.rotary.exact_norms`), which stock modules compute in fp32. A random twin has the
    config's own initialisation, drawn in fp32 with ``seed`` whatever the dtype.

    Raises:
        UserError: the model cannot be loaded, or not be walked layer by layer.
    """
    dtype = DTYPES[setting.dtype]
    if setting.weights == "random":
        model = _random_twin(read_config(path, longest), dtype, seed)
    else:
        model = build_model(
            _section(path, longest), window_tokens=longest, dtype=dtype, probe=False
        )
    model.eval().requires_grad_(False).to(device)
    check_walkable(model, workers)
    with ExitStack() as stack:
        rotary = None
        if setting.dtype == "fp64":
            stack.enter_context(exact_norms(model))
            rotary = ExactRotary(model.config)
        yield model, rotary


def _section(path: str, longest: int) -> ModelSection:
    return ModelSection(
        path=path,
        dtype="fp32",
        gradient_checkpointing=False,
        max_position_embeddings=max(trained_length(path) or longest, longest),
    )


def _random_twin(config: PreTrainedConfig, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    verify_rope(model, config)
    cast_parameters(model, dtype)
    return model
