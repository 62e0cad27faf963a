"""Checkpoints: complete or ignored, whole weights from every ZeRO stage, no silent mismatch."""

import logging

import pytest
import torch
import transformers

from anchorcontext.config import save_config
from anchorcontext.errors import UserError
from anchorcontext.testing import run_distributed
from anchorcontext.testing.configs import TINY_SCRATCH
from anchorcontext.train.checkpoint import random_states, restore_random_states
from anchorcontext.train.checkpoint_files import (
    WorldLayout,
    find_checkpoints,
    read_checkpoint,
    write_manifest,
)
from anchorcontext.train.consolidate import gather_state_dict, load_consolidated_state_dict
from anchorcontext.train.loop import Trainer
from anchorcontext.train.reshard import check_movable
from anchorcontext.train.resume import check_resumable
from anchorcontext.train.writer import QueuedWriter, snapshot


def train_and_save(rank, world_size, configs):
    """One step and a checkpoint for each config; the live weights and logits of a fixed input."""
    live = {}
    for key, config in configs.items():
        trainer = Trainer(config)
        trainer.run_step()
        path = trainer.save()
        live[key] = (path, gather_state_dict(trainer.job.engine))
        trainer.sinks.close()
        trainer.job.engine.destroy()
    return live


def test_every_zero_stage_gives_whole_weights(tiny):
    configs = {
        (stage, dtype, tied): tiny(
            run={"name": f"{stage}-{dtype}-{tied}"},
            model={
                "dtype": dtype,
                "scratch": {**TINY_SCRATCH, "tie_word_embeddings": tied},
            },
            parallel={"sp": 2},
            train={"zero_stage": stage},
        )
        for stage in range(4)
        for dtype, tied in [("fp32", False), ("bf16", True)]
    }
    live = run_distributed(train_and_save, 2, configs, group_timeout=60.0)[0]
    reference = {}
    for (stage, dtype, tied), (path, weights) in live.items():
        whole = load_consolidated_state_dict(path)
        # 9 a layer, embedding, last norm, head (hazard 30).
        assert len(whole) == 21 and all(w.numel() for w in whole.values())
        assert {w.dtype for w in whole.values()} == {torch.float32}
        assert whole.keys() == weights.keys()
        for name, weight in weights.items():
            assert torch.equal(whole[name].to(weight.dtype), weight), (stage, dtype, name)
        if dtype == "bf16":
            assert any(not torch.equal(w, w.bfloat16().float()) for w in whole.values()), "masters"
        head = torch.equal(whole["lm_head.weight"], whole["model.embed_tokens.weight"])
        assert head == tied
        # The stages differ in how they shard, not in what they compute.
        first = reference.setdefault((dtype, tied), whole)
        for name, weight in whole.items():
            torch.testing.assert_close(weight, first[name], rtol=0, atol=1e-5)


def test_the_consolidated_weights_are_the_live_model(tiny, tmp_path):
    config = tiny(train={"zero_stage": 3})
    path, weights = run_distributed(train_and_save, 1, {0: config})[0][0]
    model_config = transformers.AutoConfig.for_model(**config.model.scratch, vocab_size=128)
    ids = torch.arange(20)[None]
    logits = []
    for state in (weights, load_consolidated_state_dict(path)):
        model = transformers.AutoModelForCausalLM.from_config(model_config)
        model.load_state_dict(state)
        logits.append(model(ids).logits.detach())
    assert torch.equal(*logits)


def several_saves(rank, world_size, config):
    trainer = Trainer(config)
    paths = []
    for _ in range(4):
        trainer.run_step()
        paths.append(trainer.save())
    trainer.sinks.close()
    return paths


def latest(rank, world_size, config, records):
    """What a second start resumes from, and what the log says."""
    handler = logging.Handler()
    messages = []
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("anchorcontext").addHandler(handler)
    logging.getLogger("anchorcontext").setLevel(logging.INFO)
    trainer = Trainer(config)
    trainer.sinks.close()
    return trainer.step, messages


def test_torn_checkpoints_are_ignored_and_named(tiny):
    config = tiny(checkpoint={"keep": 3})
    paths = run_distributed(several_saves, 1, config)[0]
    folder = paths[0].parent
    assert [p.name for p in sorted(folder.iterdir())] == [p.name for p in paths[1:]], "keep 3"
    assert [c.step for c in find_checkpoints(folder)[0]] == [2, 3, 4]

    (paths[3] / "trainer.json").write_text("{}")  # cut short
    states = next(paths[2].glob("engine/*optim_states.pt"))
    states.unlink()
    torn = folder / "step-000009.tmp"
    torn.mkdir()
    complete, reasons = find_checkpoints(folder)
    assert [c.step for c in complete] == [2]
    assert len(reasons) == 3
    step, messages = run_distributed(latest, 1, config, None)[0]
    assert step == 2
    text = "\n".join(messages)
    for part in ("trainer.json has 2 bytes", f"{states.name} is missing", "step-000009.tmp"):
        assert part in text
    assert f"resumed from {paths[1]}" in text


def flip_bits(path):
    """Damage that keeps the size."""
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(byte ^ 0xFF for byte in content[middle : middle + 64])
    path.write_bytes(content)


def test_damage_that_keeps_the_size_is_found_by_its_checksum(tiny):
    config = tiny(checkpoint={"keep": 3})
    paths = run_distributed(several_saves, 1, config)[0]
    weights = next(paths[-1].glob("engine/*model_states.pt"))
    flip_bits(weights)
    step, messages = run_distributed(latest, 1, config, None)[0]
    assert step == 3, "the previous good one is taken"
    assert any("damaged" in text and weights.name in text for text in messages)
    with pytest.raises(UserError, match=r"damaged checkpoint: .*model_states\.pt"):
        load_consolidated_state_dict(paths[-1])
    for path in paths[1:-1]:
        flip_bits(next(path.glob("engine/*model_states.pt")))
    with pytest.raises(RuntimeError, match="every checkpoint is damaged"):
        run_distributed(latest, 1, config, None)
    for path in paths[1:]:
        (path / "trainer.json").unlink()
    with pytest.raises(RuntimeError, match="every checkpoint is damaged"):
        run_distributed(latest, 1, config, None)  # a run does not start anew on its own


def resumed_and_saved(rank, world_size, config):
    """One step and save after a resume: the newest checkpoint then, and all that are there."""
    trainer = Trainer(config)
    trainer.run_step()
    trainer.save()
    trainer.sinks.close()
    newest = trainer.checkpoints.latest()
    return newest.step, sorted(path.name for path in trainer.checkpoints.folder.iterdir())


def test_damaged_checkpoints_do_not_displace_those_written_after_going_back(tiny):
    paths = run_distributed(several_saves, 1, tiny(checkpoint={"keep": 3}))[0]
    for path in paths[2:]:
        flip_bits(next(path.glob("engine/*model_states.pt")))
    config = tiny(checkpoint={"keep": 1})
    (found,) = run_distributed(resumed_and_saved, 1, config)
    assert found == (3, ["step-000003", "step-000004"]), "4 is damaged, and older than the new 3"


def saves_that_cannot_remove(rank, world_size, config):
    """The system refuses to remove checkpoints, as NFS does while somebody reads them."""
    from anchorcontext.train import checkpoint

    own = checkpoint.shutil.rmtree

    def busy(path, **options):
        if ".old" in str(path):
            raise OSError(16, "Device or resource busy", str(path))
        own(path, **options)

    checkpoint.shutil.rmtree = busy
    paths = several_saves(rank, world_size, config)
    trainer = Trainer(config)
    trainer.run_step()
    return [*paths, trainer.save()]


def test_an_old_checkpoint_that_cannot_be_removed_costs_no_new_one(tiny):
    paths = run_distributed(saves_that_cannot_remove, 1, tiny(checkpoint={"keep": 1}))[0]
    complete, _ = find_checkpoints(paths[0].parent)
    assert [checkpoint.step for checkpoint in complete] == [5]


def test_a_flipped_bit_in_any_small_file_is_found(tmp_path):
    for name in ("config.yaml", "trainer.json", "hf/config.json", "manifest.json"):
        folder = tmp_path / name.replace("/", "-") / "step-000003"
        (folder / "hf").mkdir(parents=True)
        for file in ("config.yaml", "trainer.json", "hf/config.json"):
            (folder / file).write_text('{"seed": 10, "position": 1234567}')
        write_manifest(folder, {"step": 3, "layout": {}})
        assert read_checkpoint(folder).step == 3
        content = (folder / name).read_bytes()
        place = content.index(b"3" if name == "manifest.json" else b"4")
        (folder / name).write_bytes(content[:place] + b"7" + content[place + 1 :])
        with pytest.raises(UserError, match=r"does not match its checksum"):
            read_checkpoint(folder)


def test_a_file_that_the_disk_gives_no_more_is_damage(tmp_path, monkeypatch):
    folder = tmp_path / "step-000003"
    folder.mkdir()
    (folder / "config.yaml").write_text("seed: 1")
    write_manifest(folder, {"step": 3, "layout": {}})

    def broken(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("pathlib.Path.read_bytes", broken)
    complete, reasons = find_checkpoints(tmp_path)
    assert complete == [] and "config.yaml cannot be read: Input/output error" in reasons[0]


def test_a_snapshot_is_a_copy_that_shares_what_was_shared(tmp_path):
    whole = torch.arange(12.0)
    state = {"all": whole, "some": [whole[3:7].view(2, 2)], "step": 3, "none": (None, whole[:0])}
    copied = snapshot(state)
    whole.zero_()
    assert torch.equal(copied["all"], torch.arange(12.0))
    copied["all"][3] = -1.0
    assert copied["some"][0][0, 0] == -1.0 and copied["step"] == 3
    writer = QueuedWriter(background=True)
    (tmp_path / "engine").mkdir()
    writer.save(state, "/somewhere/else/a.pt")
    whole.fill_(5.0)
    writer.write(tmp_path).result()
    assert torch.load(tmp_path / "engine" / "a.pt")["all"].sum() == 0
    writer.save(state, "a.pt")
    with pytest.raises(OSError, match=r"no-such-folder.*MiB are free there"):
        writer.write(tmp_path / "no-such-folder").result()
    writer.close()


def test_what_a_cpu_saved_is_loaded_on_a_gpu(monkeypatch):
    given = []
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *state: given.append(state))
    states = random_states(torch.device("cpu"))
    restore_random_states(states, torch.device("cuda", 1))
    assert given == []
    restore_random_states(states | {"cuda": "state"}, torch.device("cuda", 1))
    assert given == [("state", torch.device("cuda", 1))]


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path):
    (tmp_path / "step-000001").mkdir()
    with pytest.raises(UserError, match=r"manifest\.json cannot be read"):
        read_checkpoint(tmp_path / "step-000001")
    assert find_checkpoints(tmp_path / "nowhere") == ([], [])


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"steps": 9}},
        {"train": {"log_every": 3}},
        {"checkpoint": {"every": 7, "keep": 5}},
        {"watch": {"tensorboard": True}, "parity": {"every": 3}},
        {"data": {"on_error": "skip"}},
        {"attention": {"engine": "reference"}, "model": {"gradient_checkpointing": True}},
        {"attention": {"anchor": {"copies": True}}},
    ],
)
def test_what_may_change_over_a_resume(tiny, sections):
    check_resumable(tiny(), tiny(**sections))


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"optimizer": {"lr": 0.5}}, r"optimizer.lr: 0.01 -> 0.5"),
        ({"run": {"seed": 4}}, r"run.seed: 0 -> 4"),
        ({"data": {"shuffle": False}}, r"data.shuffle: True -> False"),
        ({"attention": {"mode": "full"}}, r"attention.mode: 'anchor' -> 'full'"),
        ({"attention": {"anchor": {"visible": False}}}, r"anchor.visible: True -> False"),
        ({"positions": {"clamp_first": True}}, r"positions.clamp_first: False -> True"),
        ({"train": {"windows_per_step": 2}}, r"train.windows_per_step: 4 -> 2"),
        ({"deepspeed": {"wall_clock_breakdown": True}}, r"config: deepspeed.wall_clock_breakdown"),
    ],
)
def test_what_would_make_it_another_run_is_refused(tiny, sections, named):
    with pytest.raises(UserError, match=named):
        check_resumable(tiny(), tiny(**sections))


def test_state_on_nvme_moves_to_no_other_layout():
    layout = WorldLayout(8, 4, 3, "bf16", "nvme")
    check_movable(layout, layout)
    check_movable(WorldLayout(8, 4, 3, "bf16"), WorldLayout(4, 2, 1, "bf16", "cpu"))
    for other in (WorldLayout(4, 4, 3, "bf16", "nvme"), WorldLayout(8, 4, 3, "bf16", "none")):
        for pair in ((layout, other), (other, layout)):
            with pytest.raises(UserError, match=r"on NVMe"):
                check_movable(*pair)


def test_more_steps_change_a_cosine_schedule(tiny):
    cosine = {"schedule": {"type": "cosine"}}
    with pytest.raises(UserError, match=r"train.steps: 4 -> 9"):
        check_resumable(tiny(**cosine), tiny(**cosine, train={"steps": 9}))


def test_a_saved_config_is_read_back_equal(tiny, tmp_path):
    from anchorcontext.config import load_config

    config = tiny()
    save_config(config, tmp_path / "config.yaml")
    check_resumable(load_config(tmp_path / "config.yaml"), config)
