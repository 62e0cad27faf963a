"""Attention from unrotated queries and keys to its output, with a number format at every stage.

Arithmetic is fp64; what a stage produces is rounded to its format, so that a format changes one
place and nothing else. Products of matrices accumulate in fp32 where their stage is fp32 or
narrower, as processors do. A :class:`Stack` names a format for each stage: what a real
implementation does, or one stage in low precision alone.

==============  ================================================================================
inputs          q, k and v as the projections hand them out
positions       position ids
frequencies     theta ** (-2i/d)
angles          their products
tables          cosines and sines
rotation        RoPE's two products and their sum
operands        rotated q and k as they enter the dot product
scores          the dot products, and again after the scale
softmax         differences to the row's largest, exponentials, their sum, quotients
probabilities   what the softmax hands on
values          probabilities and v as they enter the weighted sum
output          the weighted sum
==============  ================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ...errors import UserError
from ..walk import LayerHeads
from .formats import FORMATS, check_format, round_to

STAGES = (
    "inputs",
    "positions",
    "frequencies",
    "angles",
    "tables",
    "rotation",
    "operands",
    "scores",
    "softmax",
    "probabilities",
    "values",
    "output",
)
# How many of them decide the rotated q and k.
ROTATED = STAGES.index("operands") + 1
# Every implementation computes the angles in fp32, whatever the dtype of the model.
WIDE = ("positions", "frequencies", "angles")


@dataclass(frozen=True)
class Stack:
    """A format for every stage, in the order of :data:`STAGES`.

    ``frequencies``: those whose dimensions of q and k go through the stages up to the operands; the
    other dimensions stay fp64. None: all go.
    """

    name: str
    formats: tuple[str, ...]
    frequencies: tuple[int, ...] | None = None

    def __getitem__(self, stage: str) -> str:
        return self.formats[STAGES.index(stage)]

    @classmethod
    def of(cls, name: str, default: str, **changes: str) -> Stack:
        """``default`` at every stage but those named."""
        return cls(name, tuple(changes.get(stage, default) for stage in STAGES))

    @property
    def rounds(self) -> list[int]:
        """Stages that are not fp64."""
        return [i for i, name in enumerate(self.formats) if name != "fp64"]

    def alone(self, stage: int) -> Stack:
        """That stage as here, all others in fp64."""
        return self._only({stage})

    def up_to(self, stage: int) -> Stack:
        """The stages up to and with that one as here, later ones in fp64."""
        return self._only(set(range(stage + 1)))

    def on(self, frequencies: tuple[int, ...]) -> Stack:
        """This one on the dimensions of some frequencies."""
        return replace(self, frequencies=frequencies)

    def _only(self, kept: set[int]) -> Stack:
        formats = (f if i in kept else "fp64" for i, f in enumerate(self.formats))
        return replace(self, formats=tuple(formats))


EXACT = Stack.of("exact", "fp64")


def parse_stack(text: str) -> Stack:
    """The stack that ``text`` names, ``KIND:FORMAT``; kinds are those of :data:`KINDS`, and a
    stage's own name for that stage alone.

    Raises:
        UserError: no such kind or format.
    """
    kind, _, fmt = text.strip().partition(":")
    if kind in STAGES and fmt:
        return Stack.of(f"{kind}:{fmt}", "fp64", **{kind: check_format(fmt)})
    if kind not in KINDS or not fmt:
        raise UserError(
            f"stack {text!r}: give KIND:FORMAT, KIND one of {', '.join(KINDS)} or a stage "
            f"({', '.join(STAGES)}), FORMAT one of {', '.join(FORMATS)}; as in sdpa:bf16"
        )
    return _stack(kind, check_format(fmt))


KINDS = {
    "all": "every stage in the format; angles in fp32",
    "eager": "transformers' eager attention: fp32 softmax, all else rounded to the format",
    "sdpa": "transformers' sdpa and flash attention, and our engines: rotated in the format; "
    "scores and softmax fp32; probabilities rounded where they meet the values",
    "rotation-fp32": "ours with attention.precision.rotation fp32: tables rounded, rotated in fp32",
    "tables-fp32": "ours with rope_tables and rotation fp32; our triton engine with RoPE inside",
    "qk-fp32": "ours with rope_tables, rotation and qk fp32: only inputs and output are rounded",
    "quantised": "sdpa in bf16 with q, k, probabilities and v quantised to the format, as fp8 "
    "attention",
}
"""What each kind of stack is, by name."""


def _stack(kind: str, fmt: str) -> Stack:
    wide = dict.fromkeys(WIDE, "fp64" if fmt == "fp64" else "fp32")
    changes: Mapping[str, str] = {}
    default = fmt
    if kind != "all":
        changes = {"softmax": "fp32"}
    if kind in ("sdpa", "rotation-fp32", "tables-fp32", "qk-fp32", "quantised"):
        changes = {**changes, "scores": "fp32", "probabilities": "fp32"}
    if kind in ("rotation-fp32", "tables-fp32", "qk-fp32"):
        changes = {**changes, "rotation": "fp32"}
    if kind in ("tables-fp32", "qk-fp32"):
        changes = {**changes, "tables": "fp32"}
    if kind == "qk-fp32":
        changes = {**changes, "operands": "fp32", "values": "fp32"}
    if kind == "quantised":
        default = "bf16"
        changes = {**changes, "operands": fmt, "values": fmt}
    return Stack.of(f"{kind}:{fmt}", default, **{**wide, **changes})


@dataclass(frozen=True)
class Heads(LayerHeads):
    """Unrotated heads of one layer, fp64.

    ``inv_freq`` (R / 2,) radians a position for the first R dimensions of a head; ``factor`` on
    cosines and sines.
    """

    inv_freq: torch.Tensor
    factor: float = 1.0


def rotate(x: torch.Tensor, position_ids: torch.Tensor, heads: Heads, stack: Stack) -> torch.Tensor:
    """A head (T, D) of q or k, rotated (RoFormer, arXiv 2104.09864) and ready for the product."""
    positions = round_to(position_ids.double(), stack["positions"])
    frequencies = round_to(heads.inv_freq, stack["frequencies"])
    angles = round_to(positions[:, None] * frequencies, stack["angles"])
    angles = torch.cat((angles, angles), dim=-1)
    cos = round_to(angles.cos() * heads.factor, stack["tables"])
    sin = round_to(angles.sin() * heads.factor, stack["tables"])
    exact_input, x = x, round_to(x, stack["inputs"])
    turned, rest = x[:, : cos.shape[1]], x[:, cos.shape[1] :]
    first, second = turned.chunk(2, dim=-1)
    across = torch.cat((-second, first), dim=-1)
    place = stack["rotation"]
    turned = round_to(round_to(turned * cos, place) + round_to(across * sin, place), place)
    rotated = round_to(torch.cat((turned, rest), dim=-1), stack["operands"])
    if stack.frequencies is None:
        return rotated
    first_half = torch.tensor(stack.frequencies)
    dims = torch.cat((first_half, first_half + len(heads.inv_freq)))
    return rotate(exact_input, position_ids, heads, EXACT).index_copy(1, dims, rotated[:, dims])


def scores_of(
    query: torch.Tensor, key: torch.Tensor, later: torch.Tensor, scaling: float, stack: Stack
) -> torch.Tensor:
    """Scores (rows, keys) of rotated queries; ``later`` (rows, keys) marks keys that are hidden,
    whose scores are -inf."""
    place = stack["scores"]
    scores = round_to(_product(query, key.t(), place), place)
    return round_to(scores * scaling, place).masked_fill_(later, -torch.inf)


def weights_of(scores: torch.Tensor, stack: Stack) -> torch.Tensor:
    """Probabilities (rows, keys) of scores."""
    place = stack["softmax"]
    if place == "fp64":
        weights = scores.softmax(-1)
    else:
        away = round_to(scores - scores.amax(-1, keepdim=True), place)
        exponentials = round_to(away.exp(), place)
        weights = round_to(exponentials / round_to(exponentials.sum(-1, True), place), place)
    return round_to(weights, stack["probabilities"])


def output_of(weights: torch.Tensor, value: torch.Tensor, stack: Stack) -> torch.Tensor:
    """The weighted sum (rows, D) of values (keys, D)."""
    place = stack["values"]
    value = round_to(value, stack["inputs"])
    out = _product(round_to(weights, place), round_to(value, place), place)
    return round_to(out, stack["output"])


def _product(left: torch.Tensor, right: torch.Tensor, place: str) -> torch.Tensor:
    if place == "fp64":
        return left @ right
    return (left.float() @ right.float()).double()
