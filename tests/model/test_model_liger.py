"""Liger's fused loss against ours: in Triton's interpreter, so in a process that asks for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from anchorcontext.errors import UserError
from anchorcontext.model import check_liger

CASES = """
import torch
from anchorcontext.model.liger import check_liger, liger_cross_entropy
from anchorcontext.model.loss import linear_cross_entropy
from anchorcontext.testing.models import tiny_llama
from anchorcontext import Window, enable, make_plan, shard
from anchorcontext.model import TrainModel

check_liger(torch.device("cpu"))
torch.manual_seed(0)
for dtype, limit in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
    for labels in (torch.randint(0, 300, (70,)), torch.full((70,), -100)):
        labels[::7] = -100
        found = []
        for loss_of in (linear_cross_entropy, liger_cross_entropy):
            torch.manual_seed(1)
            hidden = torch.randn(2, 35, 32).to(dtype).requires_grad_()
            weight = torch.randn(300, 32).to(dtype).requires_grad_()
            loss = loss_of(hidden, weight, labels.view(2, 35))
            assert loss.dtype == torch.float32 and loss.shape == ()
            (loss * 0.25).backward()
            assert hidden.grad.dtype == weight.grad.dtype == dtype
            found.append([x.double() for x in (loss.detach(), hidden.grad, weight.grad)])
        for ours, theirs in zip(*found, strict=True):
            assert (ours - theirs).norm() <= limit * ours.norm(), (dtype, ours, theirs)

window = Window.from_documents([[5, 6, 7], [8, 9, 10, 11]], anchor_id=1)
plan = make_plan(window)
local = shard(window, plan)
losses = []
for kernel in ("native", "liger"):
    model = TrainModel(enable(tiny_llama()), 4, kernel)
    loss, count = model(local.input_ids, local.position_ids, local.labels, plan)
    losses.append(float(loss.detach()))
assert abs(losses[0] - losses[1]) < 1e-5 * losses[0], losses
print("equal")
"""


def test_equals_our_loss_and_gradients():
    done = subprocess.run(
        [sys.executable, "-c", CASES],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0 and "equal" in done.stdout, done.stderr


def test_is_refused_where_it_cannot_run(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match=r"loss.kernel = liger: .* on GPUs, not on cpu; .*native"):
        check_liger(torch.device("cpu"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"not installed; pip install 'anchorcontext\[liger\]'"):
        check_liger(torch.device("cuda"))
