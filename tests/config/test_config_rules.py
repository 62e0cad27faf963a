"""Rules between keys, the DeepSpeed section, and the shape of the world."""

from __future__ import annotations

from pathlib import Path

import pytest

from anchorcontext.config import WorldShape, load_config
from anchorcontext.errors import UserError

VALID = """\
run: {name: job}
model: {path: some/model}
data: {path: windows, window_tokens: 64}
train: {steps: 4, windows_per_step: 8}
"""
SCRATCH = "model={path: null, scratch: {model_type: llama}}"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(VALID)
    return path


def message(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "key", "rule"),
    [
        (["model.path=null"], "model.path = null", "exactly one of model.path and model.scratch"),
        (["model.scratch={model_type: llama}"], "model.path", "exactly one of"),
        ([SCRATCH], "data.tokenizer = null", "a model from scratch brings no tokenizer"),
        ([SCRATCH, "model.scratch={}"], "model.scratch.model_type", "names the architecture"),
        (
            [SCRATCH, "data.tokenizer=t", "model.scratch.torch_dtype=float16"],
            "model.scratch.torch_dtype",
            "is decided by model.dtype",
        ),
        (
            [SCRATCH, "data.tokenizer=t", "model.rope.theta=1e6", "model.scratch.rope_theta=1e4"],
            "model.scratch.rope_theta = 10000.0",
            "contradicts model.rope",
        ),
        (
            ["watch.profile={from: 5}"],
            "watch.profile.from = 5",
            "train.steps = 4: nothing would be recorded; set it to 4 or less",
        ),
        (
            ["model.gradient_checkpointing=false", "model.checkpoint_every=2"],
            "model.checkpoint_every = 2",
            "model.gradient_checkpointing = false",
        ),
        (
            ["model.gradient_checkpointing=false", "model.keep_attention=true"],
            "model.keep_attention = true",
            "model.gradient_checkpointing = false",
        ),
        (["model.compile=true", "train.zero_stage=3"], "model.compile = true", "zero_stage = 3"),
        (["train.partitioned_init=true"], "train.partitioned_init = true", "train.zero_stage = 1"),
        (
            ["train.offload_optimizer=cpu", "train.zero_stage=0"],
            "train.offload_optimizer = 'cpu'",
            "train.zero_stage = 0",
        ),
        (
            [
                "train.offload_optimizer=cpu",
                "deepspeed={zero_optimization: {offload_optimizer: {device: nvme}}}",
            ],
            "offload_optimizer.device = 'nvme'",
            "contradicts train.offload_optimizer = cpu",
        ),
        (["model.rope.type=yarn"], "model.rope.factor = null", "needs a factor"),
        (["model.rope={type: default, factor: 2}"], "model.rope.factor = 2.0", "has no meaning"),
        (["model.max_position_embeddings=63"], "= 63", "data.window_tokens = 64"),
        (
            [SCRATCH, "data.tokenizer=t", "model.scratch.max_position_embeddings=32"],
            "model.scratch.max_position_embeddings = 32",
            "data.window_tokens = 64",
        ),
        (
            ["attention.exact=true", "attention.exchange=ring"],
            "attention.exchange = 'ring'",
            "rounds differently for every sp, which attention.exact rules out",
        ),
        (["data.train_tokenizer.vocab_size=300"], "data.train_tokenizer", "has its own tokenizer"),
        (
            [SCRATCH, "data.tokenizer=t", "data.train_tokenizer.vocab_size=300"],
            "data.tokenizer = 't'",
            "a tokenizer of its own",
        ),
        (["data.sources=[{kind: text}]"], "data.sources.0.path = null", "is a file or a folder"),
        (["data.anchor=none"], "data.anchor = 'none'", "needs an anchor at token 0"),
        (["train.micro_batch_windows=3"], "train.windows_per_step = 8", "set it to 9"),
        (["schedule.warmup_steps=5"], "schedule.warmup_steps = 5", "train.steps = 4"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(
    path: Path, overrides: list[str], key: str, rule: str
) -> None:
    text = message(path, *overrides)
    assert key in text
    assert rule in text


def test_a_window_beyond_the_models_range_is_fine_when_positions_restart(path: Path) -> None:
    overrides = ["model.max_position_embeddings=32", "attention.mode=intra_doc_reset"]
    assert load_config(path, overrides).data.window_tokens == 64


def test_modes_without_an_anchor_accept_none(path: Path) -> None:
    assert load_config(path, ["data.anchor=none", "attention.mode=full"]).data.anchor == "none"


@pytest.mark.parametrize(
    ("option", "value", "ours"),
    [
        ("zero_optimization.stage", "3", "train.zero_stage = 1"),
        ("gradient_clipping", "0.5", "train.clip_norm = 1.0"),
        ("bf16.enabled", "false", "model.dtype = 'bf16'"),
        ("fp16.enabled", "true", "model.dtype = 'bf16'"),
        ("train_batch_size", "8", "train.windows_per_step"),
        ("train_micro_batch_size_per_gpu", "1", "train.micro_batch_windows"),
        ("gradient_accumulation_steps", "1", "train.windows_per_step"),
        ("optimizer", "{type: Adam}", "the optimizer section"),
        ("scheduler", "{type: WarmupLR}", "the schedule section"),
        ("sequence_parallel_size", "2", "parallel.sp"),
        ("curriculum_learning", "{enabled: true}", "data.window_tokens"),
        ("zero_optimization", "true", "train.zero_stage"),
    ],
)
def test_a_deepspeed_option_that_contradicts_our_keys_is_refused_naming_them(
    path: Path, option: str, value: str, ours: str
) -> None:
    text = message(path, f"deepspeed.{option}={value}")
    assert f"deepspeed.{option} = " in text
    assert ours in text


def test_other_deepspeed_options_pass_and_equal_ones_are_dropped(path: Path) -> None:
    config = load_config(
        path,
        [
            "deepspeed={communication_data_type: fp32, gradient_clipping: 1.0}",
            "deepspeed.bf16={enabled: true}",
            "deepspeed.train_batch_size=auto",
            "deepspeed.zero_optimization={stage: 1, overlap_comm: false}",
        ],
    )
    assert config.deepspeed_options() == {
        "communication_data_type": "fp32",
        "bf16": {},
        "zero_optimization": {"overlap_comm": False},
    }
    assert config.deepspeed["gradient_clipping"] == 1.0


@pytest.mark.parametrize(
    ("world", "sp", "micro", "shape"),
    [
        (1, 1, 1, WorldShape(dp=1, sp=1, accumulation=8)),
        (4, 2, 1, WorldShape(dp=2, sp=2, accumulation=4)),
        (8, 4, 2, WorldShape(dp=2, sp=4, accumulation=2)),
        (64, 8, 1, WorldShape(dp=8, sp=8, accumulation=1)),
    ],
)
def test_the_world_gives_dp_and_accumulation(
    path: Path, world: int, sp: int, micro: int, shape: WorldShape
) -> None:
    config = load_config(path, [f"parallel.sp={sp}", f"train.micro_batch_windows={micro}"])
    assert config.check_world(world) == shape


def test_a_world_that_sp_does_not_divide_is_refused_with_what_would(path: Path) -> None:
    config = load_config(path, ["parallel.sp=4"])
    with pytest.raises(
        UserError, match=r"parallel\.sp = 4: .* 6; set .*sp=3 or start 4 or 8 ranks"
    ):
        config.check_world(6)


def test_windows_that_the_world_does_not_divide_are_refused_with_what_would(path: Path) -> None:
    config = load_config(path)
    with pytest.raises(UserError, match=r"= 8: must be a multiple of 3 = dp 3 .* 6 or 9"):
        config.check_world(3)
    with pytest.raises(UserError, match=r"= 8: must be a multiple of 16 = dp 16 .* set it to 16"):
        config.check_world(16)
