"""Loss, gradients, norms and parameters equal those of one stock process, for every (dp, sp), ZeRO.

The oracle is stock transformers with an explicit 4-D mask and torch's SGD: Adam would hide a wrong
factor. Targets are uneven over windows, some windows have none, gradients accumulate (hazards 3 to
7 and 20).
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from anchorcontext import Window
from anchorcontext.config import parse_config
from anchorcontext.model import TrainModel, build_model
from anchorcontext.parallel import build_mesh
from anchorcontext.testing import run_distributed
from anchorcontext.testing.oracle import dense_mask
from anchorcontext.train.consolidate import gather_state_dict, strip_wrapper
from anchorcontext.train.control import Control
from anchorcontext.train.engine import apply_step, build_engine
from anchorcontext.train.step import (
    NO_TARGETS,
    NOT_FINITE,
    count_targets,
    plan_micro_batches,
    run_micro_batch,
    train_step,
)
from anchorcontext.watch.metrics import StepMeter, gather_steps

VOCAB, WINDOWS, STEPS = 128, 8, 3


def settings(*, sp=1, stage=0, micro=1, clip=None, dtype="fp32", windows=WINDOWS):
    return parse_config(
        {
            "run": {"name": "scale"},
            "model": {
                "dtype": dtype,
                "gradient_checkpointing": False,
                "scratch": {
                    "model_type": "llama",
                    "hidden_size": 64,
                    "intermediate_size": 128,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                    "vocab_size": VOCAB,
                },
            },
            "data": {"path": "none", "tokenizer": "none", "window_tokens": 32},
            "optimizer": {"type": "sgd", "lr": 0.1, "weight_decay": 0.0},
            "parallel": {"sp": sp},
            "train": {
                "steps": STEPS,
                "windows_per_step": windows,
                "micro_batch_windows": micro,
                "clip_norm": clip,
                "zero_stage": stage,
            },
        }
    )


def fresh_model(config):
    return build_model(config.model, window_tokens=32, seed=0, probe=False)


def step_windows(step):
    """8 windows with 0 to 27 targets each."""
    rng = np.random.default_rng(step)
    windows = []
    for number in range(WINDOWS):
        lengths = rng.integers(1, 9, size=4)
        documents = [rng.integers(1, VOCAB, n) for n in lengths]
        window = Window.from_documents(documents, anchor_id=0)
        share = (0.0, 0.1, 0.9)[number % 3]
        targets = rng.random(window.num_tokens) < share
        windows.append(Window(window.input_ids, window.cu_seqlens, loss_mask=targets))
    return windows


def stock_run(clip):
    """One process: mean loss, gradient norm and gradients of each step, and the last weights."""
    model = fresh_model(settings())
    model.set_attn_implementation("sdpa")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    for step in range(STEPS):
        total, count = torch.zeros(()), 0
        for window in step_windows(step):
            mask = dense_mask(window.doc_ids.tolist(), "anchor")
            logits = model(
                torch.tensor(window.input_ids)[None],
                position_ids=torch.tensor(window.position_ids)[None],
                attention_mask=torch.zeros(mask.shape).masked_fill(~mask, -1e30)[None, None],
                use_cache=False,
            ).logits[0]
            labels = torch.tensor(window.labels)
            total = total + F.cross_entropy(logits, labels, reduction="sum")
            count += int((labels != -100).sum())
        (total / count).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")))
        optimizer.step()
        optimizer.zero_grad()
        steps.append((float(total.detach()) / count, norm, count, gradients))
    return steps, {name: p.detach().clone() for name, p in model.named_parameters()}


def distributed_run(rank, world_size, sp, micro, clip):
    """The same steps through mesh, plan, engine; for every ZeRO stage."""
    from deepspeed.utils import safe_get_full_grad

    mesh, control = build_mesh(sp), Control.create()
    results = {}
    for stage in range(4):
        config = settings(sp=sp, stage=stage, micro=micro, clip=clip)
        engine = build_engine(TrainModel(fresh_model(config)), config, torch.device("cpu"))
        steps = []
        for step in range(STEPS):
            windows, share = step_windows(step), mesh.dp * micro
            first = mesh.dp_rank * micro
            batches = [windows[at + first : at + first + micro] for at in range(0, WINDOWS, share)]
            plans = plan_micro_batches(batches, mesh, config.attention, control)
            targets, meter = count_targets(batches, mesh, control), StepMeter()
            if step == 0:
                # ``train_step`` taken apart, to read the gradients before the update.
                for index, plan in enumerate(plans):
                    engine.set_gradient_accumulation_boundary(index == len(plans) - 1)
                    run_micro_batch(engine, plan, world_size / targets, meter)
                gradients = {
                    strip_wrapper(name): safe_get_full_grad(parameter).clone()
                    for name, parameter in engine.module.named_parameters()
                }
                norm, applied = apply_step(engine)
                assert applied
            else:
                outcome = train_step(engine, plans, targets, meter)
                assert outcome.skip_reason is None
                norm = outcome.grad_norm
            ranks = gather_steps(meter.finish())
            assert sum(share.loss_tokens for share in ranks) == targets
            steps.append((sum(share.loss_sum for share in ranks) / targets, norm, targets))
        results[stage] = (steps, gradients if rank == 0 else {}, gather_state_dict(engine))
        engine.destroy()
    return results


@pytest.mark.parametrize(
    ("dp", "sp", "micro", "clip"),
    [(1, 1, 4, None), (2, 1, 2, None), (1, 2, 4, 0.3), (1, 4, 8, None), (2, 2, 2, None)],
)
def test_equal_to_one_stock_process_on_every_zero_stage(dp, sp, micro, clip):
    expected, weights = stock_run(clip)
    results = run_distributed(distributed_run, dp * sp, sp, micro, clip, group_timeout=60.0)[0]
    for steps, gradients, final in results.values():
        for (loss, norm, count), (true_loss, true_norm, true_count, _) in zip(
            steps, expected, strict=True
        ):
            assert count == true_count
            assert loss == pytest.approx(true_loss, rel=1e-6)
            assert norm == pytest.approx(true_norm, rel=1e-6)
        true_gradients = expected[0][3]
        assert gradients.keys() == true_gradients.keys()
        for name, true in true_gradients.items():
            # The norm's ratio tells a factor; the entries tell everything else.
            assert float(gradients[name].norm() / true.norm()) == pytest.approx(1.0, abs=1e-6)
            torch.testing.assert_close(gradients[name], true, rtol=1e-4, atol=1e-6)
        assert final.keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(final[name], weight, rtol=1e-6, atol=1e-6)


def accumulation(rank, world_size):
    """The targets [3, 5, 7, 13] in one micro-batch of four and in four of one, under ZeRO-1."""
    mesh, control = build_mesh(1), Control.create()
    rng = np.random.default_rng(0)
    windows = [
        Window.from_documents([rng.integers(1, VOCAB, n + 1)], anchor_id=0) for n in (3, 5, 7, 13)
    ]
    assert [window.num_targets for window in windows] == [3, 5, 7, 13]
    weights = []
    for micro in (1, 4):
        config = settings(stage=1, micro=micro, windows=4)
        engine = build_engine(TrainModel(fresh_model(config)), config, torch.device("cpu"))
        batches = [windows[at : at + micro] for at in range(0, 4, micro)]
        plans = plan_micro_batches(batches, mesh, config.attention, control)
        train_step(engine, plans, count_targets(batches, mesh, control), StepMeter())
        weights.append(gather_state_dict(engine))
    return weights


def test_accumulation_does_not_change_the_step():
    one_by_one, together = run_distributed(accumulation, 1)[0]
    for name, weight in one_by_one.items():
        torch.testing.assert_close(together[name], weight, rtol=0, atol=1e-7)


def odd_steps(rank, world_size):
    """Steps with targets on one rank only, with none at all, and with a broken weight."""
    mesh, control = build_mesh(2), Control.create()
    found = {}
    for stage, dtype in [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16")]:
        config = settings(sp=2, stage=stage, windows=1, dtype=dtype)
        engine = build_engine(TrainModel(fresh_model(config)), config, torch.device("cpu"))
        document = np.arange(1, 17)

        def window(*targets, document=document):
            mask = np.isin(np.arange(16), targets)
            return Window(document, [0, 16], "intra_doc", loss_mask=mask)

        def step(*targets, config=config, engine=engine, window=window):
            plans = plan_micro_batches([[window(*targets)]], mesh, config.attention, control)
            meter = StepMeter()
            count = count_targets([[window(*targets)]], mesh, control)
            return train_step(engine, plans, count, meter), gather_steps(meter.finish())

        one_rank, ranks = step(1, 2, 3)
        before, rate = gather_state_dict(engine), engine.get_lr()
        nothing, _ = step()
        after_nothing = gather_state_dict(engine)
        with torch.no_grad():
            for module in engine.module.modules():
                module.register_forward_hook(poison)
        broken, _ = step(1, 2, 3)
        after_broken = gather_state_dict(engine)
        same = [
            all(torch.equal(before[n], w[n]) for n in before) for w in (after_nothing, after_broken)
        ]
        found[stage, dtype] = (
            one_rank,
            [share.loss_tokens for share in ranks],
            nothing,
            broken,
            same if rank == 0 else [True, True],
            rate == engine.get_lr(),
        )
        engine.destroy()
    return found


def poison(module, arguments, output):
    return output * float("nan") if isinstance(output, torch.Tensor) else output


def test_steps_without_targets_and_with_nan_leave_everything_as_it_was():
    for found in run_distributed(odd_steps, 2, group_timeout=60.0):
        for one_rank, tokens, nothing, broken, same, same_rate in found.values():
            assert one_rank.num_targets == 3 and sorted(tokens) == [0, 3]
            assert one_rank.skip_reason is None and 0 < one_rank.grad_norm < 100
            assert (nothing.num_targets, nothing.skip_reason) == (0, NO_TARGETS)
            assert broken.skip_reason == NOT_FINITE and not np.isfinite(broken.grad_norm)
            assert same == [True, True] and same_rate
