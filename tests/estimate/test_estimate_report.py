"""The whole estimate: hardware profiles, worlds, modes, the command, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from anchorcontext.cli import group
from anchorcontext.config import load_config
from anchorcontext.data import WindowRecord, build_folder
from anchorcontext.errors import UserError
from anchorcontext.estimate.report import estimate_plan, fit_world
from anchorcontext.estimate.shape import configured_sizes
from anchorcontext.estimate.windows import default_mix, sample_windows
from anchorcontext.hardware import load_hardware, profile_names
from anchorcontext.watch.flops import document_pairs

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
FAMILIES = {
    "llama2_7b": {"model_type": "llama", "num_key_value_heads": 32, "vocab_size": 32000},
    "llama3_8b": {"model_type": "llama", "intermediate_size": 14336, "vocab_size": 128256},
    "mistral_7b": {
        "model_type": "mistral",
        "intermediate_size": 14336,
        "sliding_window": None,
        "vocab_size": 32768,
    },
    "qwen2_7b": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "demo_smollm2": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    },
}


@pytest.fixture
def model_folder(tmp_path):
    """A folder that holds the config.json of one of the recipes' models, and no weights."""

    def make(stem):
        family = next(keys for name, keys in FAMILIES.items() if stem.startswith(name))
        defaults = {
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rope_theta": 10000.0,
        }
        (tmp_path / "config.json").write_text(json.dumps(defaults | family))
        return str(tmp_path)

    return make


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_planned_in_seconds(path, model_folder):
    overrides = [] if path.stem == "demo" else [f"model.path={model_folder(path.stem)}"]
    config = load_config(path, overrides)
    started = time.process_time()
    sizes = configured_sizes(config)
    sp = config.parallel.sp
    estimate = estimate_plan(config, sizes, load_hardware("h100"), [sp, 16 * sp], "slimpajama")
    assert time.process_time() - started < 5
    assert [world.world_size for world in estimate.worlds] == [sp, 16 * sp]
    for world in estimate.worlds:
        full, intra, anchor = world.modes[:3]
        assert full.step_seconds > anchor.step_seconds >= intra.step_seconds > 0
        assert full.attention_flops > anchor.attention_flops > intra.attention_flops
        assert 0 < full.mfu <= estimate.hardware.compute_fraction
    few, many = (world.modes[2] for world in estimate.worlds)
    assert many.memory.activations.stored < few.memory.activations.stored


def demo(*overrides):
    return load_config(ROOT / "configs" / "demo.yaml", ["data.window_tokens=4096", *overrides])


def test_a_thousand_ranks_and_where_their_bytes_go():
    config = demo("train.windows_per_step=8", "data.window_tokens=65536")
    sizes = configured_sizes(config)
    estimate = estimate_plan(config, sizes, load_hardware("h100"), [8, 1024], "upsampled")
    one_node, many = estimate.worlds
    assert (one_node.sp, one_node.note) == (2, None)
    assert (many.sp, many.dp) == (128, 8)
    assert "parallel.sp = 128 instead of 2" in str(many.note)
    assert all(mode.sent_across == 0 for mode in one_node.modes)
    assert one_node.state_traffic.across == 0 < many.state_traffic.across
    assert many.modes[0].sent_across > many.modes[2].sent_across > 0


def test_the_flops_of_full_attention_are_those_of_the_window():
    config = demo()
    sizes = configured_sizes(config)
    found = estimate_plan(config, sizes, load_hardware("cpu"), [2], "slimpajama").worlds[0]
    full = found.modes[0]
    assert full.pairs_a_window == document_pairs([4096])
    width = sizes.num_heads * sizes.head_dim * sizes.num_layers
    assert full.attention_flops == 14 * document_pairs([4096]) * width
    assert full.linear_flops == 6 * sizes.linear_weights * 4096


def test_ring_flash_attn_is_planned_for_the_configured_mode_with_its_own_bytes():
    config = demo(
        *("attention.backend=ring_flash_attn", "attention.mode=full", "model.dtype=bf16"),
        *("parallel.sp=2", "train.windows_per_step=2"),
    )
    sizes = configured_sizes(config)
    worlds = estimate_plan(config, sizes, load_hardware("h100"), [2, 4], "slimpajama").worlds
    for world in worlds:
        (mode,) = world.modes
        assert (mode.mode, mode.layout, mode.exchange) == ("full", "zigzag", "ring")
        # Keys in forward and backward in bf16, one hop; their gradients in fp32, two hops.
        rows = 4096 // 2
        row = 2 * sizes.num_kv_heads * sizes.head_dim
        assert mode.sent_first == [rows * row * (2 * 2 + 2 * 4) * sizes.num_layers] * 2
    with pytest.raises(UserError, match=r"no parallel\.sp fits"):
        fit_world(config, sizes, 1)


@pytest.mark.parametrize(
    ("stage", "gradients", "weights"), [(0, 8, 0), (1, 8, 4), (2, 16, 4), (3, 8, 16)]
)
def test_gradient_and_weight_traffic_by_zero_stage(stage, gradients, weights):
    """Bytes a parameter on two ranks and two micro-batches, times (W - 1) / W = 1/2; fp32."""
    config = demo(f"train.zero_stage={stage}", "train.windows_per_step=2")
    sizes = configured_sizes(config)
    world = estimate_plan(config, sizes, load_hardware("cpu"), [2], "slimpajama").worlds[0]
    assert world.accumulation == 2
    n = sizes.parameters
    assert world.state_traffic.gradient_bytes == gradients * n / 2
    assert world.state_traffic.weight_bytes == weights * n / 2


def test_a_slower_network_and_a_slower_device_cost_time(tmp_path):
    profile = (ROOT / "anchorcontext" / "hardware" / "profiles" / "h100.yaml").read_text()
    slow = tmp_path / "slow.yaml"
    slow.write_text(
        profile.replace("network_bytes_per_second: 50e9", "network_bytes_per_second: 1e9")
    )
    config = demo("train.windows_per_step=1")
    sizes = configured_sizes(config)

    def seconds(hardware):
        return estimate_plan(config, sizes, load_hardware(hardware), [16], "slimpajama")

    fast, slower = seconds("h100").worlds[0].modes[0], seconds(str(slow)).worlds[0].modes[0]
    assert slower.exchange_seconds > fast.exchange_seconds
    assert slower.linear_seconds == fast.linear_seconds
    assert seconds("cpu").worlds[0].modes[0].linear_seconds > 100 * fast.linear_seconds


def test_profiles_are_complete():
    assert profile_names() == ["a100-80g", "b200", "cpu", "h100", "h200"]
    for name in profile_names():
        hardware = load_hardware(name)
        assert hardware.peak_bf16_flops >= hardware.peak_fp32_flops
        assert hardware.node_bytes_per_second > hardware.network_bytes_per_second


def test_samples_fill_the_window_behind_an_anchor():
    config = demo()
    for mix in ("slimpajama", "upsampled", "stdlib"):
        for window in sample_windows(config, mix, 3):
            assert window.num_tokens == 4096
            assert window.cu_seqlens[1] == 1
    bare = sample_windows(demo("data.anchor=none", "attention.mode=full"), "stdlib", 1)[0]
    assert bare.num_tokens == 4096


def test_prepared_windows_are_planned_as_they_lie_on_disk(tmp_path):
    folder = tmp_path / "windows"
    with build_folder(folder) as builder:
        builder.write_documents([(["web"], ["a.txt"], np.array([12]))])
        edges, rows = np.array([0, 1, 5, 12]), np.array([-1, 0, 0])
        builder.write_windows([WindowRecord(np.arange(12), edges, rows, np.array([0, 0, 4]))])
        builder.write_meta(
            {"anchor_id": 0, "vocab_size": 300, "window_tokens": 12, "num_documents": 1}
        )
    tokenizer = ("data.train_tokenizer=null", "data.tokenizer=unused", f"data.path={folder}")
    config = demo(*tokenizer, "data.window_tokens=12")
    assert default_mix(config) == "prepared"
    sizes = configured_sizes(config)
    assert sizes.vocab_size == 300  # the prepared windows' tokenizer
    found = estimate_plan(config, sizes, load_hardware("cpu"), [2], "prepared").worlds[0]
    pairs = {mode.mode: mode.pairs_a_window for mode in found.modes}
    assert pairs == {"full": 78, "intra_doc": 67, "anchor": 78}
    longer = demo(*tokenizer)
    assert default_mix(longer) == "stdlib"
    with pytest.raises(UserError, match="holds windows of 12 tokens"):
        sample_windows(longer, "prepared", 1)


def plan(*arguments):
    return CliRunner().invoke(group, ["plan", *map(str, arguments)])


def test_the_command(tmp_path):
    out = tmp_path / "plan.json"
    result = plan(
        ROOT / "configs" / "demo.yaml",
        "data.window_tokens=4096",
        "data.path=nowhere",
        *("--world", "2,4", "--hardware", "cpu", "--json", out),
    )
    assert result.exit_code == 0, result.output
    assert "mix stdlib" in result.output
    assert "fits" in result.output
    report = json.loads(out.read_text())
    assert [world["world_size"] for world in report["worlds"]] == [2, 4]
    mode = report["worlds"][0]["modes"][2]
    assert mode["mode"] == "anchor"
    assert len(mode["sent_first"]) == 2
    assert mode["memory"]["peak"] == max(mode["memory"]["phases"].values())
    assert report["kinds"]["attention bytes"].startswith("exact")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world", "2,x"], "--world '2,x'"),
        (["--world", "2048"], "1 to 1024 ranks"),
        (["--world", "0"], "1 to 1024 ranks"),
        (["--mix", "books"], "'books' is not one of 'slimpajama', 'upsampled', 'stdlib'"),
        (["--mix", "prepared", "data.path=nowhere"], "anchorcontext prepare"),
        (["--hardware", "h10"], "did you mean 'h100'?"),
        (["model.path=meta-llama/Llama-2-7b-hf", "model.scratch=null"], "plan downloads nothing"),
    ],
)
def test_mistakes_are_named(arguments, message):
    tokenizer = ["data.train_tokenizer=null", "data.tokenizer=unused", "data.path=nowhere"]
    result = plan(ROOT / "configs" / "demo.yaml", *tokenizer, *arguments)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("memory_bytes: 80e9", ""), "lacks [memory_bytes]"),
        (("memory_bytes:", "memory:"), "does not know [memory]"),
        (("80e9", "-1"), "memory_bytes = -1 must be a positive number"),
        (("devices_per_node: 8", "devices_per_node: 7.5"), "devices_per_node = 7.5"),
        (("kind: gpu", "kind: tpu"), "kind = 'tpu' must be gpu or cpu"),
        (("compute_fraction: 0.4", "compute_fraction: 40"), "at most 1"),
    ],
)
def test_a_wrong_profile_is_refused_by_its_key(change, message, tmp_path):
    path = tmp_path / "mine.yaml"
    profile = ROOT / "anchorcontext" / "hardware" / "profiles" / "h100.yaml"
    path.write_text(profile.read_text().replace(*change))
    with pytest.raises(UserError, match=r"mine\.yaml") as raised:
        load_hardware(str(path))
    assert message in str(raised.value)


def test_sp_is_changed_only_where_the_recipe_does_not_divide():
    config = demo("train.windows_per_step=8", "parallel.sp=4")
    sizes = configured_sizes(config)
    assert fit_world(config, sizes, 8)[1] is None
    assert fit_world(config, sizes, 2)[0].parallel.sp == 2
    ulysses = demo("train.windows_per_step=1", "attention.exchange=ulysses")
    with pytest.raises(UserError, match=r"no parallel\.sp fits"):
        fit_world(ulysses, sizes, 1024)  # 4 query heads cannot be swapped among 1,024 ranks


def test_planning_does_not_import_deepspeed():
    code = (
        "import sys\nfrom anchorcontext.cli import main\n"
        f"sys.argv = ['anchorcontext', 'plan', {str(ROOT / 'configs' / 'demo.yaml')!r},"
        " 'data.window_tokens=1024', '--mix', 'slimpajama']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "assert 'deepspeed' not in sys.modules\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


def test_windows_with_copies_of_the_anchor_are_planned_without_the_mode_anchor(tmp_path):
    folder = tmp_path / "windows"
    record = WindowRecord(
        np.arange(4096) % 9,
        np.array([0, 1, 2000, 2001, 4096]),
        np.array([0, 0, 1, 1]),
        np.array([-1, 0, -1, 0]),
    )
    with build_folder(folder) as builder:
        builder.write_documents([(["s", "s"], ["a", "b"], np.array([1999, 2095]))])
        builder.write_windows([record])
        builder.write_meta(
            {"anchor_id": 0, "vocab_size": 9, "window_tokens": 4096, "num_documents": 2}
        )
    config = demo(f"data.path={folder}", "data.anchor_copies=documents", "attention.mode=intra_doc")
    found = estimate_plan(config, configured_sizes(config), load_hardware("cpu"), [2], "prepared")
    assert [mode.mode for mode in found.worlds[0].modes] == ["full", "intra_doc"]
    assert found.documents_a_window == 2


def test_controls_are_planned_as_they_are_trained():
    def of(*overrides):
        config = demo("parallel.sp=2", "model.dtype=bf16", *overrides)
        sizes = configured_sizes(config)
        plan = estimate_plan(config, sizes, load_hardware("cpu"), [2], "upsampled")
        (found,) = [mode for mode in plan.worlds[0].modes if mode.mode == "anchor"]
        return found

    plain, hidden = of(), of("attention.anchor.visible=false")
    alone = of("attention.anchor.copies=true")
    assert (plain.view, hidden.view) == ("anchor", "anchor (hidden anchor)")
    assert alone.view == "anchor, copied to every document"
    # Everybody's pair with the anchor; a copy is seen by its document and by itself.
    assert plain.pairs_a_window - hidden.pairs_a_window == 4095
    assert alone.pairs_a_window > plain.pairs_a_window
    wide = of(*(f"attention.precision.{part}=fp32" for part in ("rope_tables", "rotation", "qk")))
    assert plain.sent_mean < wide.sent_mean < 2 * plain.sent_mean
    assert plain.memory.activations.stored < wide.memory.activations.stored
