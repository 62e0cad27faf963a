"""Chunked linear cross-entropy: the dense value and gradients, fp32 inside, little memory."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from anchorcontext.model import linear_cross_entropy
from anchorcontext.model import loss as loss_module
from anchorcontext.model.loss import token_losses


def problem(tokens=37, classes=128, width=16, dtype=torch.float32, spread=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = spread * torch.randn(tokens, width, generator=generator)
    weight = torch.randn(classes, width, generator=generator)
    labels = torch.randint(0, classes, (tokens,), generator=generator)
    labels[::5] = -100
    leaf = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
    return *leaf, labels


def dense(hidden, weight, labels):
    """The whole logits in fp64."""
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    loss = F.cross_entropy(h @ w.t(), labels, reduction="sum", ignore_index=-100)
    loss.backward()
    return loss.item(), h.grad, w.grad


@pytest.mark.parametrize("chunk", [1, 7, 37, 1000])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-13)])
def test_value_and_gradients_equal_the_dense_ones(chunk, dtype, tolerance):
    hidden, weight, labels = problem(dtype=dtype)
    loss = linear_cross_entropy(hidden, weight, labels, chunk)
    assert loss.dtype == dtype and loss.shape == ()
    (3.7 * loss).backward()
    expected, d_hidden, d_weight = dense(hidden, weight, labels)
    assert abs(loss.item() - expected) <= tolerance * expected
    for mine, theirs in ((hidden.grad, d_hidden), (weight.grad, d_weight)):
        assert (mine.double() - 3.7 * theirs).abs().max() <= 3.7 * tolerance * theirs.abs().max()


def test_on_a_gpu_bf16_is_multiplied_as_it_is_into_fp32_sums(monkeypatch):
    """A CPU has no such products: they are put in their place, with CUDA's rules for dtypes."""
    into_sums = []

    def mm(a, b, *, out_dtype):
        assert a.dtype == b.dtype == torch.bfloat16 and out_dtype == torch.float32
        return a.float() @ b.float()

    def addmm(sums, a, b, *, out_dtype, out):
        assert out is sums and sums.dtype == out_dtype
        into_sums.append(sums.data_ptr())
        return out.add_(mm(a, b, out_dtype=out_dtype))

    class OnGpu(loss_module._Product):
        def __init__(self, weight, accumulator):
            super().__init__(weight, accumulator)
            self._mixed, self._weight = True, weight

    monkeypatch.setattr(loss_module, "_Product", OnGpu)
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    hidden, weight, labels = problem(dtype=torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, labels, 7)
    loss.backward()
    expected, d_hidden, d_weight = dense(hidden, weight, labels)
    assert abs(loss.item() - expected) <= 1e-6 * expected
    for mine, theirs in ((hidden.grad, d_hidden), (weight.grad, d_weight)):
        assert (mine.double() - theirs).abs().max() <= 2**-7 * theirs.abs().max()
    assert len(into_sums) == 6 and len(set(into_sums)) == 1, "every chunk into the same gradient"


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="comes with torch 2.13")
def test_it_agrees_with_the_function_of_torch_in_fp32():
    hidden, weight, labels = problem()
    mine = linear_cross_entropy(hidden, weight, labels, 8)
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=8)
    theirs = F.linear_cross_entropy(
        hidden, weight, labels, reduction="sum", ignore_index=-100, options=options
    )
    assert torch.allclose(mine, theirs, rtol=1e-6)


def test_batches_of_windows_are_summed():
    hidden, weight, labels = problem(tokens=36)
    flat = linear_cross_entropy(hidden, weight, labels, 8)
    shaped = linear_cross_entropy(hidden.view(2, 18, -1), weight, labels.view(2, 18), 8)
    assert torch.equal(flat, shaped)


def test_hazard_8_a_bf16_model_has_an_fp32_loss():
    """Equal to the fp64 loss of the bf16 operands, far finer than the bf16 grid."""
    hidden, weight, labels = problem(tokens=512, dtype=torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, labels, 64)
    loss.backward()
    expected, d_hidden, d_weight = dense(hidden, weight, labels)
    assert loss.dtype == torch.float32
    assert abs(loss.item() - expected) <= 1e-6 * expected
    assert abs(loss.bfloat16().item() - expected) > 1e-5 * expected
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    for mine, theirs in ((hidden.grad, d_hidden), (weight.grad, d_weight)):
        # One rounding to bf16, half a unit in the last of 8 bits, on top of fp32 noise.
        error = (mine.double() - theirs).abs()
        assert (error <= 2**-8 * theirs.abs() + 1e-6 * theirs.abs().max()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hazard_3_without_targets_loss_and_gradients_are_zero(dtype):
    hidden, weight, labels = problem(dtype=dtype)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100), 8)
    loss.backward()
    assert loss.item() == 0.0
    assert not hidden.grad.any() and not weight.grad.any()


def test_rows_without_a_target_do_not_matter_whatever_they_hold():
    hidden, weight, labels = problem()
    expected = linear_cross_entropy(hidden, weight, labels, 8)
    spoilt = hidden.detach().clone()
    spoilt[labels == -100] = float("nan")
    spoilt.requires_grad_()
    loss = linear_cross_entropy(spoilt, weight, labels, 8)
    loss.backward()
    assert torch.equal(loss, expected)
    assert torch.isfinite(weight.grad).all() and torch.isfinite(spoilt.grad).all()


def test_large_logits_stay_finite():
    hidden, weight, labels = problem(spread=1e4)
    loss = linear_cross_entropy(hidden, weight, labels, 8)
    loss.backward()
    expected, d_hidden, _ = dense(hidden, weight, labels)
    assert abs(loss.item() - expected) <= 1e-5 * expected
    assert (hidden.grad - d_hidden).abs().max() <= 1e-4 * d_hidden.abs().max()


def test_no_gradient_is_formed_when_none_is_asked_for():
    hidden, weight, labels = problem()
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, labels, 8)
    assert not loss.requires_grad
    frozen = linear_cross_entropy(hidden, weight.detach(), labels, 8)
    frozen.backward()
    assert hidden.grad is not None


def test_a_second_backward_is_an_error():
    hidden, weight, labels = problem()
    loss = linear_cross_entropy(hidden, weight, labels, 8)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward"):
        loss.backward()


MEMORY = """
import resource, torch
from anchorcontext.model.loss import linear_cross_entropy
torch.set_num_threads(1)
hidden = torch.randn(16384, 64, requires_grad=True)
weight = torch.randn(32000, 64, requires_grad=True)
labels = torch.randint(0, 32000, (16384,))
linear_cross_entropy(hidden[:8], weight, labels[:8], 1024).backward()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
linear_cross_entropy(hidden, weight, labels, 1024).backward()
print(peak() - before)
"""


@pytest.mark.slow
def test_hazard_32_memory_of_16384_tokens_and_32000_classes():
    """Whole fp32 logits would be 2.1 GB."""
    out = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True
    ).stdout
    assert int(out.split()[-1]) < 0.6e9


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_losses_of_single_tokens_and_which_targets_are_the_likeliest(chunk):
    hidden, weight, labels = problem(spread=2.0)
    logits = hidden.detach() @ weight.detach().t()
    labels[3] = logits[3].argmax()
    losses, hits = token_losses(hidden.view(1, 37, -1), weight, labels.view(1, 37), chunk)
    expected = F.cross_entropy(logits.double(), labels, reduction="none", ignore_index=-100)
    assert losses.dtype == torch.float32 and losses.shape == hits.shape == (1, 37)
    torch.testing.assert_close(losses[0].double(), expected, rtol=1e-6, atol=1e-5)
    assert torch.equal(hits[0], logits.argmax(1) == labels) and hits[0, 3]
    assert not losses.requires_grad
    total = linear_cross_entropy(hidden, weight, labels, chunk)
    assert torch.allclose(losses.sum(), total, rtol=1e-6)


def test_single_tokens_need_the_logits_of_a_chunk_of_targets_alone(monkeypatch):
    hidden, weight, labels = problem(tokens=40)
    rows, whole = [], loss_module._Product.logits

    def counted(product, x):
        rows.append(len(x))
        return whole(product, x)

    monkeypatch.setattr(loss_module._Product, "logits", counted)
    token_losses(hidden, weight, labels, 9)
    assert max(rows) <= 9 and sum(rows) == int((labels != -100).sum()) == 32
    nothing, hits = token_losses(hidden, weight, torch.full_like(labels, -100), 9)
    assert not nothing.any() and not hits.any() and sum(rows) == 32
