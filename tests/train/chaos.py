"""Chaos: one training run that is killed, stopped, starved of disk and damaged, again and again.

    python tests/train/chaos.py --faults 40 --seed 0        (make chaos)

Each *life* of the run starts its ranks anew, as a scheduler would, and ends by one fault. After
every life: all ranks are gone within 60 s, and the newest intact checkpoint is not older than
before. In the end the weights and the whole loss curve equal those of an undisturbed run, bit for
bit. Faults strike at a drawn step of a drawn rank; saving in the background is drawn too.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from anchorcontext.config import Config
from anchorcontext.data import WindowRecord, build_folder
from anchorcontext.testing.configs import tiny_run
from anchorcontext.testing.distributed import PRELOAD, free_port
from anchorcontext.train.checkpoint_files import damage, find_checkpoints
from anchorcontext.train.consolidate import load_consolidated_state_dict
from anchorcontext.watch.jsonl import read_metrics

LONGEST_END = 60.0
"""Seconds from the first rank's end to the last one's."""
LONGEST_LIFE = 600.0
LAST_STEP = 4
"""The last step of a life that a fault may be drawn for."""
KINDS = (
    "kill all in a step",
    "kill one in a step",
    "raise in a step",
    "terminate all",
    "terminate one",
    "kill in a save",
    "kill before the rename",
    "kill in a load",
    "kill at any time",
    "disk full once",
    "disk full",
    "flip bits",
    "cut a file short",
)


@dataclasses.dataclass(frozen=True)
class Fault:
    """What strikes in one life. ``step``: counted from the step that the life starts with."""

    kind: str
    rank: int
    step: int
    background: bool
    delay: float


def draw(kind: str, chance: random.Random, ranks: int) -> Fault:
    """A fault of a kind, at a random place."""
    return Fault(
        kind,
        chance.randrange(ranks),
        chance.randint(1, LAST_STEP),
        chance.random() < 0.5,
        chance.random(),
    )


def run_config(folder: Path, name: str, total: int, background: bool = False) -> Config:
    """A tiny LLaMA on two ranks that share each window, ZeRO-2, a schedule that knows its end."""
    return tiny_run(
        folder / "windows",
        24,
        folder / "runs",
        run={"name": name},
        optimizer={"lr": 1e-3},
        schedule={"type": "cosine", "warmup_steps": 2},
        parallel={"sp": 2},
        train={"steps": total, "windows_per_step": 2, "zero_stage": 2},
        checkpoint={"every": 2, "keep": 3, "background": background},
    )


def prepare(folder: Path) -> None:
    """Eight windows of three documents behind an anchor."""
    rng = np.random.default_rng(0)
    rows = np.array([-1, 0, 1, 2])
    with build_folder(folder / "windows") as builder:
        builder.write_documents([(["s"] * 3, ["a", "b", "c"], np.array([9, 9, 9]))])
        builder.write_windows(
            WindowRecord(
                np.r_[0, rng.integers(1, 128, 23)],
                np.r_[0, 1, np.sort(rng.choice(np.arange(2, 24), 2, replace=False)), 24],
                rows,
                np.zeros(4, dtype=np.int64),
            )
            for _ in range(8)
        )
        builder.write_meta(
            {"anchor_id": 0, "vocab_size": 128, "window_tokens": 24, "num_documents": 3}
        )


def rank_main(rank: int, ranks: int, port: int, config: Config, fault: Fault | None) -> None:
    """One rank of a life, as ``anchorcontext train`` under a launcher."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    from anchorcontext.train import failure, loop

    torch.set_num_threads(1)
    logging.basicConfig(level=logging.ERROR, format=f"rank {rank}: %(message)s", force=True)
    failure.ECHO_SECONDS = 0.5
    if fault is not None:
        arm(fault, rank, ranks)
    try:
        loop.train(config)
    except Exception as error:
        if fault is None:
            raise
        logging.debug("%s: %s", type(error).__name__, error)
        sys.exit(1)


def arm(fault: Fault, rank: int, ranks: int) -> None:
    """Place the fault in this process: the same code runs, and dies at the drawn place."""
    from anchorcontext.train import checkpoint, loop, writer

    mine = rank == fault.rank
    first: dict[str, int] = {}

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if fault.kind == "kill in a load" and mine:
        checkpoint.CheckpointStore.latest = lambda self: die()
        return
    if fault.kind == "kill before the rename" and rank == 0:
        checkpoint.CheckpointStore._complete = lambda self, pending: die()
        return
    if fault.kind == "kill in a save" and mine:
        write = writer.write_states

        def half(states: dict, folder: Path) -> None:
            write(dict(list(states.items())[: fault.step - 1]), folder)
            die()

        writer.write_states = half
        return
    step = loop.train_step

    def struck(*arguments: object, **options: object) -> object:
        first["step"] = first.get("step", 0) + 1
        now, everybody = first["step"] == fault.step, fault.kind.endswith("all")
        if now and (fault.kind == "kill all in a step" or (mine and "kill one" in fault.kind)):
            die()
        if mine and fault.kind == "kill at any time" and first["step"] > LAST_STEP:
            time.sleep(LONGEST_LIFE)  # a fast machine would be done before the kill
        if now and mine and fault.kind == "raise in a step":
            raise OSError("chaos")
        if now and "terminate" in fault.kind and (mine or everybody):
            os.kill(os.getpid(), signal.SIGTERM)
        if first["step"] == fault.step + 3 and fault.kind == "disk full once":
            os.kill(os.getpid(), signal.SIGTERM)  # it was survived
        if mine and fault.kind.startswith("disk full"):
            spared = 2 if fault.kind == "disk full once" else LONGEST_LIFE
            full = fault.step <= first["step"] < fault.step + spared
            limit = 1 << 16 if full else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        return step(*arguments, **options)

    loop.train_step = struck


def live(config: Config, fault: Fault | None, ranks: int) -> list[int]:
    """One life; the exit codes of its ranks.

    Raises:
        TimeoutError: a rank was still there 60 s after the first one ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    port = free_port()
    processes = [
        context.Process(target=rank_main, args=(rank, ranks, port, config, fault), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        started, ended = time.monotonic(), None
        while any(process.is_alive() for process in processes):
            now = time.monotonic()
            if ended is None and not all(process.is_alive() for process in processes):
                ended = now
            if ended is not None and now - ended > LONGEST_END:
                raise TimeoutError(f"{fault}: a rank hangs {LONGEST_END:g} s after another ended")
            if now - started > LONGEST_LIFE:
                raise TimeoutError(f"{fault}: no end after {LONGEST_LIFE:g} s")
            if fault and fault.kind == "kill at any time" and now - started > 4 * fault.delay:
                processes[fault.rank].kill()
            time.sleep(0.02)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def spoil(checkpoints: Path, fault: Fault) -> bool:
    """Damage the newest checkpoint, where an older one is there to fall back on."""
    complete, _ = find_checkpoints(checkpoints)
    if len(complete) < 2:
        return False
    files = sorted(complete[-1].path.rglob("*.*"))
    file = files[int(fault.delay * len(files))]
    content = bytearray(file.read_bytes())
    if fault.kind == "cut a file short":
        content = content[: len(content) // 2]
    else:
        middle = len(content) // 2
        content[middle : middle + 8] = bytes(byte ^ 0xFF for byte in content[middle : middle + 8])
    file.write_bytes(content)
    return True


def newest_intact(checkpoints: Path) -> int:
    """The step of the newest checkpoint without damage; 0 when there is none."""
    intact = [
        checkpoint.step
        for checkpoint in find_checkpoints(checkpoints)[0]
        if damage(checkpoint.path.rglob("*.pt")) is None
    ]
    return max(intact, default=0)


def chaos(folder: Path, faults: int, seed: int, ranks: int = 2) -> list[Fault]:
    """Run it; returns the faults that struck.

    Raises:
        AssertionError, TimeoutError: what must hold does not.
    """
    chance = random.Random(seed)
    kinds = [*chance.sample(KINDS, len(KINDS)), *chance.choices(KINDS, k=faults)][:faults]
    total = 6 * faults + 10  # a life that outlasts a full disk goes seven steps
    prepare(folder)
    reference = run_config(folder, "undisturbed", total)
    assert live(reference, None, ranks) == [0] * ranks

    run = folder / "runs" / "disturbed"
    checkpoints = run / "checkpoints"
    struck = []
    for kind in kinds:
        fault = draw(kind, chance, ranks)
        before = newest_intact(checkpoints)
        assert before < total, "the run was over before its faults"
        started = time.monotonic()
        if kind in ("flip bits", "cut a file short"):
            if not spoil(checkpoints, fault):
                continue
            before, codes = newest_intact(checkpoints), []
        else:
            codes = live(run_config(folder, run.name, total, fault.background), fault, ranks)
        after = newest_intact(checkpoints)
        logging.info(
            "%-22s rank %d: step %d -> %d, exit %s, %.1f s",
            *(kind, fault.rank, before, after, codes, time.monotonic() - started),
        )
        assert after >= before, f"{fault}: step {before} is lost, {after} is the newest"
        if ("terminate" in kind or kind == "disk full once") and after < total:
            assert codes == [0] * ranks and after > before, f"{fault}: {codes}, step {after}"
        struck.append(fault)
    assert live(run_config(folder, run.name, total), None, ranks) == [0] * ranks
    assert_equal(folder / "runs" / "undisturbed", run, total)
    return struck


def assert_equal(reference: Path, run: Path, total: int) -> None:
    """The whole loss curve and the last weights, bit for bit."""
    curves = []
    for path in (reference, run):
        records, _ = read_metrics(path / "metrics.jsonl")
        keys = ("step", "loss", "grad_norm", "lr", "windows")
        curves.append([[record[key] for key in keys] for record in records])
    assert len(curves[0]) == total and curves[0] == curves[1]
    last = f"checkpoints/step-{total:06d}"
    true, found = (load_consolidated_state_dict(path / last) for path in (reference, run))
    assert true.keys() == found.keys()
    assert all(torch.equal(weight, found[name]) for name, weight in true.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="default: a temporary one, removed in the end")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    with tempfile.TemporaryDirectory(prefix="anchorcontext-chaos-") as folder:
        struck = chaos(given.folder or Path(folder), given.faults, given.seed)
    logging.info("%d faults; weights and losses are those of the undisturbed run", len(struck))
    return 0


if __name__ == "__main__":
    sys.exit(main())
