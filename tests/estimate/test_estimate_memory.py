"""Memory: closed forms against hand numbers, DeepSpeed's tensors and autograd's."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from anchorcontext import Window, enable, make_plan, shard
from anchorcontext.config import load_config
from anchorcontext.config.load import parse_config
from anchorcontext.config.sections import PrecisionSection
from anchorcontext.estimate.memory import (
    activation_memory,
    estimate_memory,
    layer_activation_bytes,
    state_memory,
)
from anchorcontext.estimate.shape import configured_sizes
from anchorcontext.model.precision import set_precision
from anchorcontext.testing import run_distributed
from anchorcontext.testing.models import tiny_config, tiny_model
from anchorcontext.watch.sizes import ModelSizes, model_sizes

SIZES = ModelSizes(
    model_type="llama",
    parameters=1_000_000,
    layer_parameters=100_000,
    linear_weights=900_000,
    num_layers=4,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=1000,
    normalizes_heads=False,
)


def make_config(dtype="bf16", stage=1, checkpointing=True, **sections):
    return parse_config(
        {
            "run": {"name": "x"},
            "model": {
                "dtype": dtype,
                "gradient_checkpointing": checkpointing,
                "scratch": {"model_type": "llama", "vocab_size": 128},
            },
            "data": {"path": "unused", "window_tokens": 64, "tokenizer": "unused"},
            "train": {"steps": 1, "windows_per_step": 4, "zero_stage": stage},
            **sections,
        }
    )


# Counted tensor by tensor under DeepSpeed 0.19.8 on two ranks, bytes a parameter: before the first
# step, and in the backward of the second (Adam's moments there, gradients not yet applied).
@pytest.mark.parametrize(
    ("dtype", "stage", "at_start", "in_backward"),
    [
        ("bf16", 0, 6, 18),
        ("bf16", 1, 8, 14),
        ("bf16", 2, 4, 10),
        ("bf16", 3, 5, 9),
        ("fp32", 0, 4, 16),
        ("fp32", 1, 6, 12),
        ("fp32", 2, 6, 12),
        ("fp32", 3, 6, 10),
    ],
)
def test_states_by_zero_stage_as_counted_on_two_ranks(dtype, stage, at_start, in_backward):
    states = state_memory(SIZES, make_config(dtype, stage), 2)
    n = SIZES.parameters
    assert states.weights + states.masters + states.gradients_kept == at_start * n
    assert states.always - states.gathered + states.gradients_made == in_backward * n


def test_what_a_rank_holds_falls_with_the_ranks_by_stage():
    def always(stage, world):
        return state_memory(SIZES, make_config("bf16", stage), world).always

    assert always(0, 1) == always(0, 64)
    for stage in (1, 2, 3):
        assert always(stage, 64) < always(stage, 8) < always(stage, 1)
    # ZeRO-3 on many ranks: next to nothing but the gathered layers.
    assert always(3, 1000) - state_memory(SIZES, make_config("bf16", 3), 1000).gathered == 18 * 1000


def test_options_of_deepspeed_and_sgd_change_the_states():
    zero = {"deepspeed": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}}
    states = state_memory(SIZES, make_config(stage=2, **zero), 4)
    assert (states.masters, states.moments) == (0, 0)
    ours = make_config(stage=2)
    ours = ours.model_copy(
        update={"train": ours.train.model_copy(update={"offload_optimizer": "cpu"})}
    )
    assert state_memory(SIZES, ours, 4) == states
    assert state_memory(SIZES, ours, 4, lazy=True).moments > 0  # a CPU's memory is the host's
    small = {"deepspeed": {"zero_optimization": {"reduce_bucket_size": 1000}}}
    assert state_memory(SIZES, make_config(stage=2, **small), 4).bucket == 2 * 1000
    assert state_memory(SIZES, make_config(stage=2), 4).bucket == 2 * 500_000_000
    assert state_memory(SIZES, make_config(stage=2), 4, lazy=True).bucket == 2 * SIZES.parameters
    assert state_memory(SIZES, make_config(optimizer={"type": "sgd"}), 4).moments == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_layer_keeps_what_autograd_keeps_of_it(model_type, dtype):
    """The difference of a model of three layers and one of two, to the byte."""
    tokens = 64
    kept = [_kept_bytes(model_type, dtype, layers, tokens) for layers in (2, 3)]
    sizes = model_sizes(tiny_config(model_type))
    assert kept[1] - kept[0] == tokens * layer_activation_bytes(sizes, dtype.itemsize)


@pytest.mark.parametrize(("qk", "attention_size"), [("model", 2), ("fp32", 4)])
def test_a_layer_that_rotates_or_attends_in_fp32_keeps_what_autograd_keeps(qk, attention_size):
    tokens, precision = 64, PrecisionSection(rope_tables="fp32", rotation="fp32", qk=qk)
    kept = [_kept_bytes("llama", torch.bfloat16, n, tokens, precision) for n in (2, 3)]
    layer = layer_activation_bytes(
        model_sizes(tiny_config("llama")), 2, attention_size=attention_size
    )
    assert kept[1] - kept[0] == tokens * layer


def _kept_bytes(model_type, dtype, num_layers, tokens, precision=None):
    model = enable(tiny_model(model_type, dtype=dtype, num_hidden_layers=num_layers))
    if precision is not None:
        set_precision(model, precision)
    window = Window(np.arange(tokens), [0, 1, tokens], "anchor")
    plan = make_plan(window)
    local = shard(window, plan)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model.get_decoder()(
            input_ids=local.input_ids, position_ids=local.position_ids, plan=plan, use_cache=False
        )
    return sum(kept.values())


def activations(config, tokens=1000, **changes):
    options = {
        "key_rows": 0,
        "step_rows": 0,
        "received_rows": 0,
        "sp_size": 1,
        "ulysses": 1,
        "on_cpu": False,
    } | changes
    return activation_memory(SIZES, config, tokens=tokens, **options)


def test_tables_and_copies_where_the_engine_rotates():
    def of(rotation, engine="auto", **changes):
        attention = {"engine": engine, "precision": {"rotation": rotation}}
        return activations(make_config(attention=attention), **changes)

    plain, gpu, cpu = of("model"), of("engine"), of("engine", on_cpu=True)
    # Heads of 16: 2 x 2 x 16 bytes a token in bf16, 4 x 16 of an engine's tables: equal.
    assert gpu == plain
    received = of("engine", received_rows=300, sp_size=4, ulysses=2)
    assert received.stored - of("model", sp_size=4, ulysses=2).stored == 64 * (2000 - 1000 + 300)
    copies = 1000 * 16 * 4 * (4 * 4 + 3 * 2)
    assert cpu.attention_work - of("model", on_cpu=True).attention_work == copies
    assert of("engine", engine="flex").attention_work - gpu.attention_work == copies


def test_activations_by_hand():
    # bf16, h 64, i 128, 4 and 2 heads of 16: norms 2 (256 + 256 + 4), attention 2*16*12 + 16,
    # gated MLP 4*2*128.
    layer = 1032 + 400 + 1024
    assert layer_activation_bytes(SIZES, 2) == layer
    rotary, last_norm = 4 * 16, 4 * 64 + 4 * 64 + 4
    plain = activations(make_config(checkpointing=False))
    assert (plain.stored, plain.recomputed) == (1000 * (rotary + 4 * layer), 0)
    again = activations(make_config())
    assert (again.stored, again.recomputed) == (1000 * (rotary + 4 * 2 * 64), 1000 * layer)
    assert plain.last_norm == again.last_norm == 1000 * last_norm


def test_attention_in_fp32_by_hand():
    """Queries, keys, values and output of 4 bytes, tables too, and the rounded output."""
    in_fp32 = {"precision": {"rope_tables": "fp32", "rotation": "fp32", "qk": "fp32"}}
    found = activations(make_config(checkpointing=False, attention=in_fp32))
    layer = 1032 + 4 * 16 * 12 + 16 + 2 * 4 * 16 + 1024
    assert found.stored == 1000 * (2 * 4 * 16 + 4 * layer)
    exchange = {"sp_size": 2, "key_rows": 100, "step_rows": 100}
    plain, wide = (
        activations(make_config(attention=a), **exchange).exchange for a in ({}, in_fp32)
    )
    assert wide - plain == 2 * 2 * 16 * 2 * (1000 + 200)


def test_levers_by_hand():
    """As above, 4 layers: what a lever takes away and adds, bytes a token."""
    layer, rotary, hidden, attention, intermediate = 2456, 64, 128, 4 * (2 * 16 + 4), 1024

    def of(**model):
        config = make_config()
        config = config.model_copy(update={"model": config.model.model_copy(update=model)})
        found = activations(config)
        return (found.stored - 1000 * rotary) / 1000, found.recomputed / 1000, found.mlp_work

    assert of() == (4 * hidden, layer, 1000 * 512)
    # Layers 0 and 2 are checkpointed; 3, which is not, is gone when 2 is recomputed.
    assert of(checkpoint_every=2)[:2] == (2 * hidden + 2 * layer, 0)
    assert of(checkpoint_every=3)[:2] == (2 * hidden + 2 * layer, layer)  # 0 and 3
    assert of(keep_attention=True)[:2] == (4 * (hidden + attention), layer - attention)
    assert of(offload_activations=True)[:2] == (0, layer + hidden)
    assert of(offload_activations=True, keep_attention=True)[:2] == (0, layer + hidden)
    chunked = (4 * hidden, layer - intermediate, 100 * 1536 + 1000 * hidden)
    assert of(mlp_chunk_tokens=100) == chunked


def test_logits_are_never_held_whole():
    config = make_config(loss={"chunk_tokens": 10})
    one, many = activations(config, tokens=1000), activations(config, tokens=2000)
    assert many.loss - one.loss == 1000 * 4 * 64  # the gradient of the hidden states alone


def test_more_ranks_less_activation_more_rows_more_buffer():
    config = make_config()
    peaks = [activations(config, tokens=8000 // sp).stored for sp in (1, 2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True)
    few, many = (activations(config, sp_size=2, key_rows=n, step_rows=n) for n in (0, 500))
    assert many.exchange - few.exchange == 500 * 2 * 2 * 16 * (2 + 2 + 12)


def test_the_peak_is_the_largest_phase_and_the_verdict_follows():
    states = state_memory(SIZES, make_config(stage=0), 1)
    work = activations(make_config(checkpointing=False))
    estimate = estimate_memory(states, work, accumulation=1, device_bytes=1e9)
    assert estimate.peak == max(estimate.phases.values())
    assert estimate.fits
    assert not estimate_memory(states, work, 1, device_bytes=estimate.peak - 1).fits
    later = estimate_memory(states, work, accumulation=2, device_bytes=1e9)
    assert later.phases["loss"] - estimate.phases["loss"] == states.gradients_made


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_counted_as_the_real_model_has_them(model_type, tied):
    model = tiny_model(model_type, tie_word_embeddings=tied)
    sizes = model_sizes(tiny_config(model_type, tie_word_embeddings=tied))
    assert sizes.parameters == sum(p.numel() for p in model.parameters())
    layer = model.get_decoder().layers[0]
    assert sizes.layer_parameters == sum(p.numel() for p in layer.parameters())
    assert sizes.head_weights == model.get_output_embeddings().weight.numel()


def measure(rank, world, path, overrides, tokens):
    """Growth of the highest resident set over a model, a step of it and AdamW, bytes."""
    import ctypes

    import numpy as np
    import torch
    import torch.distributed as dist

    from anchorcontext import Window, make_plan, shard
    from anchorcontext.config import load_config
    from anchorcontext.estimate.links import row_traffic
    from anchorcontext.model import TrainModel, build_model

    # Freed blocks go back at once (M_MMAP_THRESHOLD): otherwise glibc keeps what it may reuse.
    ctypes.CDLL(None).mallopt(-3, 2**20)

    def status(key):
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

    def step(model, tokens):
        window = Window(np.arange(tokens) % 64, [0, 1, tokens // 2, tokens], "anchor")
        plan = make_plan([window], dist.group.WORLD, "zigzag")
        local = shard([window], plan)
        loss, _ = model(local.input_ids, local.position_ids, local.labels, plan)
        loss.backward()
        return plan.data

    config = load_config(path, overrides)
    # What is imported or set up once, by a tiny model of the same kind.
    scratch = {**config.model.scratch, "hidden_size": 64}
    tiny = config.model.model_copy(update={"scratch": scratch})
    step(TrainModel(build_model(tiny, window_tokens=64, vocab_size=64, probe=False)), 64)
    vocab = config.data.train_tokenizer.vocab_size
    before = status("VmRSS")
    model = build_model(config.model, window_tokens=tokens, vocab_size=vocab, probe=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    plan = step(TrainModel(model), tokens)
    optimizer.step()
    rows = row_traffic(plan)
    return status("VmHWM") - before, int(rows.key_rows[rank]), int(rows.step_rows[rank])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize(
    ("world", "checkpointing", "dtype"), [(1, "false", "fp32"), (2, "true", "bf16")]
)
def test_memory_of_the_cpu_demo_within_15_percent_of_measured_growth(
    world, checkpointing, dtype, request
):
    path, tokens = request.config.rootpath / "configs" / "demo.yaml", 16384
    overrides = [
        f"data.window_tokens={tokens}",
        "train.zero_stage=0",
        f"model.gradient_checkpointing={checkpointing}",
        f"model.dtype={dtype}",
    ]
    config = load_config(path, overrides)
    sizes = configured_sizes(config)
    states = state_memory(sizes, config, 1, lazy=True)
    for found in run_distributed(measure, world, path, overrides, tokens):
        measured, key_rows, step_rows = found
        work = activation_memory(
            sizes,
            config,
            tokens=tokens // world,
            key_rows=key_rows,
            step_rows=step_rows,
            received_rows=0,
            sp_size=world,
            ulysses=1,
            on_cpu=True,
        )
        predicted = estimate_memory(states, work, 1, 1e12).peak
        ratio = predicted / measured
        assert abs(ratio - 1) < 0.15, f"predicted {predicted:,}, measured {measured:,}: {ratio:.3f}"
