"""What ranks must agree on, and what they need, is checked before the model is built."""

import dataclasses
import os
import re
import shutil
import socket
from functools import partial

import pytest

from anchorcontext.errors import UserError
from anchorcontext.estimate import resources
from anchorcontext.estimate.resources import check_resources, checkpoint_bytes
from anchorcontext.model import build_config
from anchorcontext.testing import run_distributed
from anchorcontext.train import preflight
from anchorcontext.train.job import Job, open_dataset
from anchorcontext.train.loop import train
from anchorcontext.watch.sizes import model_sizes

HOST = socket.gethostname()


def build(rank, world_size, configs, patch=None):
    """The job's constructor, each rank with its config; the error's text."""
    if patch is not None:
        patch(rank)
    try:
        Job(configs[rank % len(configs)], check_resources).close()
    except UserError as error:
        return str(error)
    return None


def the_message(world_size, configs, patch=None):
    messages = run_distributed(build, world_size, configs, patch)
    assert len(set(messages)) == 1, messages
    return messages[0]


def test_ranks_with_another_config_are_named_with_key_values_and_host(tiny):
    common = {"parallel": {"sp": 2}}
    usual = tiny(**common)
    other = tiny(**common, optimizer={"lr": 0.5})
    text = the_message(4, [usual, usual, other, usual])
    assert f"optimizer.lr = 0.01 on ranks 0-1,3 ({HOST}); 0.5 on rank 2 ({HOST})" in text
    assert "optimizer.lr" in text and "run.name" not in text


def older_torch(rank):
    if rank == 1:
        own = preflight.versions
        preflight.versions = lambda: own() | {"torch": "2.0.0"}
        preflight.socket.gethostname = lambda: "n2"


def test_another_version_is_named_with_its_host(tiny):
    text = the_message(2, [tiny()], older_torch)
    assert re.search(rf"versions: torch \S+ on rank 0 \({HOST}\); 2.0.0 on rank 1 \(n2\)", text)
    assert "numpy" not in text


def without_a_compiler(rank):
    if rank == 1:
        from anchorcontext.kernels import cpu_library

        cpu_library._missing = lambda: "no compiler"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_ranks_of_which_one_attends_without_the_c_kernel_are_named(tiny):
    text = the_message(2, [tiny()], without_a_compiler)
    assert f"C compiler there on rank 0 ({HOST}); missing on rank 1 ({HOST})" in text


def other_windows(rank):
    if rank == 1:
        from anchorcontext.train import job

        def changed(config):
            dataset = open_dataset(config)
            dataset.fingerprint = "f00"
            return dataset

        job.open_dataset = changed


def test_other_windows_on_one_rank_are_refused(tiny):
    text = the_message(2, [tiny()], other_windows)
    assert f"f00 on rank 1 ({HOST})" in text and "data.path" in text


def lost_message(rank, exchange):
    """In rank 1 the messages of one exchange of the check arrive as something else."""
    if rank == 1:
        own, left = preflight.dist.batch_isend_irecv, [exchange]

        def spoiled(operations):
            works = own(operations)
            for work in works:
                work.wait()
            if left.pop() == 0:
                operations[-1].tensor.fill_(7)
            left.append(exchange - 1)
            return []

        preflight.dist.batch_isend_irecv = spoiled


@pytest.mark.parametrize("exchange", [0, 1], ids=["with the next rank", "in the SP group"])
def test_a_message_that_arrives_wrong_stops_all(tiny, exchange):
    config = tiny(parallel={"sp": 2})
    with pytest.raises(RuntimeError, match=r"a message of rank 0 arrived as 7"):
        run_distributed(build, 2, [config], partial(lost_message, exchange=exchange))


def private_folder(rank):
    """Rank 1 writes what only its host has."""
    if rank == 1:
        own = resources.run_folder
        resources.SEEN_WITHIN_SECONDS = 0.2
        resources.run_folder = lambda config: own(config).with_name("of-rank-1")


def test_a_run_folder_that_is_not_shared_is_refused(tiny):
    text = the_message(2, [tiny()], private_folder)
    assert text.startswith(f"rank 1 ({HOST}): ") and "not the folder that rank 0 writes" in text


def blocked(rank):
    if rank == 1:
        resources.Path.touch = refuse


def refuse(path):
    raise PermissionError(13, "Permission denied")


def test_a_folder_that_one_rank_cannot_write_is_named(tiny):
    text = the_message(2, [tiny()], blocked)
    assert text.startswith(f"rank 1 ({HOST}): ") and "cannot be written (Permission denied)" in text


def full_disk(rank):
    usage = resources.shutil.disk_usage("/")
    resources.shutil.disk_usage = lambda path: usage._replace(free=100)


def test_a_disk_without_room_for_two_checkpoints_is_refused(tiny):
    text = the_message(2, [tiny()], full_disk)
    assert "0.0 MiB free, 2 more checkpoints need" in text and text.startswith("rank 0")


def small_device(rank):
    resources.available_memory = lambda device, ranks: 1000 if rank == 1 else 10**12


def test_a_device_too_small_for_the_states_is_named(tiny):
    text = the_message(2, [tiny()], small_device)
    assert text.startswith(f"rank 1 ({HOST}): weights, gradients and optimiser need")


def test_the_size_of_a_checkpoint_is_that_on_disk(tiny):
    scratch = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 256}
    scratch |= {"num_attention_heads": 4, "num_hidden_layers": 4}
    config = tiny(train={"steps": 1}, model={"scratch": scratch})
    (path,) = run_distributed(checkpoint_of, 1, config)
    files = [os.path.join(root, name) for root, _, names in os.walk(path) for name in names]
    on_disk = sum(os.path.getsize(file) for file in files)
    sizes = model_sizes(build_config(config.model, window_tokens=24, vocab_size=128))
    assert 1.0 <= on_disk / checkpoint_bytes(config, sizes) < 1.1


def checkpoint_of(rank, world_size, config):
    return train(config).checkpoint


def test_ranks_are_named_in_spans_by_host():
    ranks = object.__new__(preflight.Ranks)
    ranks.hosts = ["n1"] * 4 + ["n2"] * 4
    assert ranks.name([0, 1, 2, 4, 7]) == "ranks 0-2 (n1), 4,7 (n2)"
    assert ranks.differences(["a"] * 8) == ""
    assert ranks.differences(["a"] * 4 + ["b"] * 4) == "a on ranks 0-3 (n1); b on ranks 4-7 (n2)"


@pytest.mark.parametrize(
    ("hosts", "sp", "named"),
    [
        (["n1", "n2"] * 2, 2, "ranks 0 (n1), 1 (n2) share"),  # dealt out one by one
        (["n1"] * 2 + ["n2"] * 2, 2, None),
        (["n1"] * 2 + ["n2"] * 2, 4, None),  # no host has room for a group
        (["n1"] * 3 + ["n2"] * 3, 2, None),  # no numbering of them does better
        (["n1", "n2"] * 2, 1, None),
    ],
)
def test_groups_that_could_be_inside_a_host_are_named(hosts, sp, named, caplog):
    ranks = object.__new__(preflight.Ranks)
    ranks.hosts, ranks.control = hosts, dataclasses.make_dataclass("Control", ["rank"])(0)
    preflight.warn_of_spread_groups(ranks, sp)
    assert (named in caplog.text) if named else not caplog.text


def test_an_estimate_counts_the_ranks_of_the_host():
    ranks = object.__new__(preflight.Ranks)
    ranks.hosts = ["n1", "n1", "n2"]
    ranks.control = dataclasses.make_dataclass("Control", ["rank"])(0)
    import torch

    whole = resources.psutil.virtual_memory().available
    assert resources.available_memory(torch.device("cpu"), ranks) <= whole // 2 * 1.1
