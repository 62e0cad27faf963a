"""Gradients of a text's loss, and how far two of them are apart.

The model is the one that is trained (:class:`~anchorcontext.model.TrainModel`: our attention
function, chunked fp32 loss, recomputed layers), on one window in mode ``full``. Beside gradients of
parameters stand dq and dk of every layer: with respect to what the projections hand out, before
RoPE, since a shift turns the rotated ones.

Two gradients a and r are compared through four sums that add up over layers and groups: a.r, a.a,
r.r and (a - r).(a - r).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from ...errors import UserError
from ...model import TrainModel
from ...parallel import make_plan, shard
from ...window import Window

GROUPS = {
    "embedding": r"embed_tokens|lm_head",
    "q": r"\.q_proj\.",
    "k": r"\.k_proj\.",
    "v": r"\.v_proj\.",
    "o": r"\.o_proj\.",
    "mlp": r"\.mlp\.",
    "norms": r"norm",
}
HEADS = {"dq": "q_proj", "dk": "k_proj"}
CHUNK = 1 << 22


@dataclass
class TextGradients:
    """Gradients of a text's mean loss.

    ``parameters`` by name, in the dtype autograd leaves them in; ``heads`` "layers.N.dq" and
    "layers.N.dk", (T, heads times D).
    """

    loss: float
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    heads: dict[str, torch.Tensor] = field(default_factory=dict)

    def named(self) -> Mapping[str, torch.Tensor]:
        """All of them."""
        return {**self.parameters, **self.heads}


@dataclass(frozen=True)
class Apart:
    """How far gradient a is from r, over some tensors: sums in fp64."""

    dot: float = 0.0
    own: float = 0.0
    reference: float = 0.0
    difference: float = 0.0

    def __add__(self, other: Apart) -> Apart:
        return Apart(
            self.dot + other.dot,
            self.own + other.own,
            self.reference + other.reference,
            self.difference + other.difference,
        )

    @property
    def cosine(self) -> float:
        """Of the angle between them; 1 where both are zero."""
        size = math.sqrt(self.own * self.reference)
        return self.dot / size if size else float(self.own == self.reference)

    @property
    def relative(self) -> float:
        """|a - r| / |r|; 0 where both are zero."""
        if not self.reference:
            return 0.0 if not self.own else math.inf
        return math.sqrt(self.difference / self.reference)

    @property
    def norm_ratio(self) -> float:
        """|a| / |r|."""
        return math.sqrt(self.own / self.reference) if self.reference else float("nan")


def text_gradients(train_model: TrainModel, input_ids: torch.Tensor, shift: int) -> TextGradients:
    """One forward and backward over ``input_ids`` (T,), positions ``shift`` .. ``shift`` + T - 1.

    Takes the gradients out of the parameters.

    Raises:
        UserError: the layers have no q_proj and k_proj.
    """
    window = Window(input_ids, [0, input_ids.numel()], "full")
    plan = make_plan(window)
    device = next(train_model.parameters()).device
    local = shard(window, plan, device)
    found = TextGradients(0.0)
    with _captured(train_model, found.heads):
        loss, targets = train_model(local.input_ids, local.position_ids + shift, local.labels, plan)
        (loss / targets).backward()
    found.loss = float(loss.detach() / targets)
    for name, parameter in train_model.causal_lm.named_parameters():
        if parameter.grad is not None:
            found.parameters[name] = parameter.grad
            parameter.grad = None
    return found


def compare(gradients: TextGradients, reference: TextGradients) -> dict[str, Apart]:
    """By name of the tensor."""
    others = reference.named()
    return {name: _apart(tensor, others[name]) for name, tensor in gradients.named().items()}


def group_of(name: str) -> str:
    """The group of a tensor: dq, dk, or one of :data:`GROUPS`."""
    last = name.rpartition(".")[2]
    if last in HEADS:
        return last
    for group, pattern in GROUPS.items():
        if re.search(pattern, name):
            return group
    return "other"


def layer_of(name: str) -> int | None:
    """The layer of a tensor; None: of none."""
    found = re.search(r"layers\.(\d+)\.", name)
    return int(found[1]) if found else None


def is_parameter(name: str) -> bool:
    """Whether it counts for the gradient of the whole model."""
    return group_of(name) not in HEADS


def total(apart: Mapping[str, Apart], **wanted: object) -> Apart:
    """Over all parameters; with ``group`` (dq and dk are groups too) or ``layer`` over those of
    one."""
    result = Apart()
    for name, one in apart.items():
        if "group" not in wanted and not is_parameter(name):
            continue
        if "group" in wanted and group_of(name) != wanted["group"]:
            continue
        if "layer" in wanted and layer_of(name) != wanted["layer"]:
            continue
        result += one
    return result


def _apart(own: torch.Tensor, reference: torch.Tensor) -> Apart:
    sums = torch.zeros(4, dtype=torch.float64)
    for a, r in zip(own.flatten().split(CHUNK), reference.flatten().split(CHUNK), strict=True):
        a, r = a.double(), r.double()
        d = a - r
        sums += torch.stack((a.dot(r), a.dot(a), r.dot(r), d.dot(d))).cpu()
    return Apart(*sums.tolist())


@contextmanager
def _captured(train_model: nn.Module, into: dict[str, torch.Tensor]) -> Iterator[None]:
    """Within it, a backward leaves dq and dk of every layer in ``into``, fp32."""
    handles = []
    for name, module in train_model.named_modules():
        layer, last = layer_of(name + "."), name.rpartition(".")[2]
        for short, projection in HEADS.items():
            if last == projection and layer is not None:
                handles.append(
                    module.register_full_backward_hook(_keeper(into, f"layers.{layer}.{short}"))
                )
    if not handles:
        raise UserError(
            "no q_proj and k_proj in the model's layers; use a LLaMA, Qwen2, Qwen3 or Mistral model"
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _keeper(into: dict[str, torch.Tensor], name: str) -> Callable[..., None]:
    def keep(module: nn.Module, inputs: object, outputs: tuple[torch.Tensor, ...]) -> None:
        assert name not in into, "one backward a text"
        into[name] = outputs[0].detach()[0].float()

    return keep
