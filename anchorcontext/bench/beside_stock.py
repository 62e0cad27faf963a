"""A tiny LLaMA trained under our attention beside stock transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class TrainingDifference:
    """A few SGD steps under our attention against the same under stock transformers."""

    dtype: str
    engine: str
    steps: int
    loss: float
    """Largest relative difference of a step's loss."""
    weights: float
    """Relative difference of the weights' change after the last step."""


def train_beside_stock(
    device: torch.device, dtype: torch.dtype, steps: int = 3
) -> TrainingDifference:
    """Train a tiny LLaMA on one window in mode ``anchor``: ours, and stock in fp64 with a dense
    mask; plain SGD, so that a wrong gradient scale shows."""
    from ..model import TrainModel, cast_parameters, enable
    from ..model.rope import verify_rope
    from ..parallel import make_plan, shard
    from ..testing.models import stock_loss, tiny_llama
    from ..window import Window

    generator = torch.Generator().manual_seed(0)
    documents = [
        torch.randint(3, 128, (n,), generator=generator).tolist() for n in (70, 1, 300, 13, 127)
    ]
    window = Window.from_documents(documents, anchor_id=1)
    start = tiny_llama().state_dict()

    def fresh(dtype: torch.dtype) -> Any:
        model = tiny_llama()
        model.load_state_dict(start)
        return cast_parameters(model, dtype)

    ours = TrainModel(enable(fresh(dtype).to(device)), 64).train()
    stock = fresh(dtype).to(torch.float64).train()
    verify_rope(ours.causal_lm)
    plan = make_plan(window)
    local = shard(window, plan, device)
    descents = _Descent(ours.causal_lm), _Descent(stock)
    differences = []
    for _ in range(steps):
        loss_sum, count = ours(local.input_ids, local.position_ids, local.labels, plan)
        losses = loss_sum / count, stock_loss(stock, window) / window.num_targets
        for loss, descent in zip(losses, descents, strict=True):
            loss.backward()
            descent.step()
        differences.append(abs(float(losses[0].detach()) / float(losses[1].detach()) - 1))
    change, expected = (descent.change() for descent in descents)
    weights = float((change - expected).norm() / expected.norm())
    name, short = plan.engine(device, dtype).name, str(dtype).removeprefix("torch.")
    worst = float(torch.tensor(differences).max())  # NaN where one of them is
    return TrainingDifference(short, name, steps, worst, weights)


class _Descent:
    """Plain SGD on fp64 copies of a model's weights."""

    def __init__(self, model: torch.nn.Module, rate: float = 0.05) -> None:
        self.parameters, self.rate = list(model.parameters()), rate
        self.before = [parameter.detach().double().clone() for parameter in self.parameters]
        self.now = [weight.clone() for weight in self.before]

    def step(self) -> None:
        """Apply the gradients and clear them."""
        with torch.no_grad():
            for parameter, weight in zip(self.parameters, self.now, strict=True):
                assert parameter.grad is not None
                weight -= self.rate * parameter.grad.double()
                parameter.copy_(weight)
                parameter.grad = None

    def change(self) -> torch.Tensor:
        """What the steps added to all weights, fp64, on the CPU."""
        pairs = zip(self.now, self.before, strict=True)
        return torch.cat([(now - before).flatten().cpu() for now, before in pairs])
