"""A step of a tiny LLaMA on CUDA tensors without values: no layer makes the host wait.

Run by tests/test_fake_cuda.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from anchorcontext import Window, enable, make_plan, shard
from anchorcontext.config.sections import PrecisionSection
from anchorcontext.model import TrainModel
from anchorcontext.model.memory import checkpoint_layers, chunk_mlps
from anchorcontext.model.precision import set_precision
from anchorcontext.model.rope import fix_rotary_buffers
from anchorcontext.plan.cache import PlanCache
from anchorcontext.testing.fake_cuda import fake_cuda
from anchorcontext.testing.models import tiny_llama

CUDA = torch.device("cuda", 0)


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr("anchorcontext.parallel.plan.PLANS", PlanCache())
    with fake_cuda() as found:
        yield found


def windows(mode):
    return [
        Window.from_documents([[3 + n] * n for n in lengths], anchor_id=1, mode=mode)
        for lengths in ((7, 13, 5, 23), (30, 9))
    ]


def make_model(**precision):
    model = enable(tiny_llama(dtype=torch.bfloat16))
    if precision:
        set_precision(model, PrecisionSection(**precision))
    return model


def move_(model):
    """``model.to("cuda")``, which cannot swap parameters without values."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(parameter.detach().to(CUDA))
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer.to(CUDA)
    fix_rotary_buffers(model)


def train(device, model, mode="anchor", **options):
    """Two steps on a micro-batch; the second copies nothing to or from the device."""
    with device.crossing():
        move_(model)
        plan = make_plan(windows(mode), **options)
        local = shard(windows(mode), plan, device=CUDA)
    module = TrainModel(model, chunk_tokens=32)
    for _ in range(2):
        before = device.copies
        loss, count = module(local.input_ids, local.position_ids, local.labels, plan)
        (loss / count).backward()
        assert loss.device == count.device == CUDA and loss.dtype == torch.float32
        for name, parameter in module.named_parameters():
            assert parameter.grad.device == CUDA, name
    return SimpleNamespace(
        engine=plan.engine(CUDA, torch.bfloat16).name, copies=device.copies - before
    )


@pytest.mark.parametrize("mode", ["anchor", "intra_doc"])
def test_a_step(device, mode):
    done = train(device, make_model(), mode)
    assert done.engine == "varlen" and done.copies == 0


def test_a_step_through_the_triton_engine(device):
    done = train(device, make_model(), engine="triton")
    assert done.engine == "triton" and done.copies == 0


@pytest.mark.parametrize(
    "precision",
    [{"rotation": "fp32", "rope_tables": "fp32"}, {"rotation": "fp32", "qk": "fp32"}],
    ids=["fp32 rotation", "fp32 queries and keys"],
)
def test_a_step_with_attention_in_fp32(device, precision):
    assert train(device, make_model(**precision), engine="triton").copies == 0


@pytest.mark.parametrize("options", [{}, {"keep": True, "offload": True}], ids=["all", "kept"])
def test_a_step_that_recomputes_layers(device, options):
    model = make_model()
    chunk_mlps(model, 16)
    checkpoint_layers(model, **options)
    done = train(device, model)
    assert (done.copies > 0) == options.get("offload", False)


def test_a_value_read_in_a_layer_is_found(device):
    def read(module, args, out):
        float(out.detach().sum())

    model = make_model()
    model.model.layers[1].mlp.register_forward_hook(read)
    with pytest.raises(RuntimeError, match="_local_scalar_dense"):
        train(device, model)
